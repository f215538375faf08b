"""Lesson 08: copies between GPUs, which GPU is busy when, and the spread of timings."""

from broken_claims import Broken

_MOVE = "        return self.second(hidden.to(self.gpus[1]))  # the new .to()"

BROKEN = [
    Broken(
        "D01",
        "both layers are on one GPU",
        old="layer_0.to(gpus[0]), layer_1.to(gpus[1])",
        new="layer_0.to(gpus[0]), layer_1.to(gpus[0])",
        further=[
            (
                "layer_1(layer_0(batch.to(gpus[0])).to(gpus[1]))",
                "layer_1(layer_0(batch.to(gpus[0])))",
            )
        ],
    ),
    Broken(
        "D02",
        "the gradient changes on its way back",
        cell="backward-crosses",
        old="after_cut = before_cut.to(gpus[1])",
        new="after_cut = 2 * before_cut.to(gpus[1])",
    ),
    Broken(
        "D02",
        "the optimizer updates nothing",
        cell="optimizer-follows",
        old="torch.optim.Adam(model.parameters())",
        new="torch.optim.Adam(model.parameters(), lr=0)",
    ),
    Broken(
        "D03",
        "the output comes back to GPU 0",
        old=_MOVE,
        new="        return self.second(hidden.to(self.gpus[1])).to(self.gpus[0])",
    ),
    Broken(
        "D04",
        "the move cuts the graph",
        cell="toy-equal",
        old=_MOVE,
        new="        return self.second(hidden.detach().to(self.gpus[1]))",
    ),
    Broken(
        "D04",
        "the halves are from a different network",
        expensive=True,
        cell="resnet-equal",
        old="cut(copy.deepcopy(whole), gpus)",
        new="cut(torchvision.models.resnet50(), gpus)",
    ),
    Broken(
        "D05",
        "copies take no time",
        expensive=True,
        old='enable(2, gpu="K80", link=link)',
        new='enable(2, gpu="K80", link=vgpu.Link("none", 1e18, 0, "none"))',
    ),
    Broken(
        "D06",
        "the batch is sent in two halves",
        expensive=True,
        old="        output = model(images.to(gpus[0]))\n        F.mse_loss",
        new="        output = torch.cat([model(half.to(gpus[0])) for half in images.chunk(2)])\n        F.mse_loss",
    ),
    Broken(
        "D12",
        "every repeat takes the same time",
        old="return time.perf_counter() - start_s",
        new="return 1.0",
    ),
]
