"""Lesson 09: what makes a pipeline, why its curve bends, and what streams must wait for."""

from broken_claims import Broken

# A few of the sweep's ten sizes.
_FEW_SIZES = [("(1, 3, 5, 8, 10, 12, 20, 40, 60, 120)", "(3, 12, 20, 40, 120)")]
# The published sizes, and the one for which three batches are recorded.
_PUBLISHED_SIZES = [("(1, 3, 5, 8, 10, 12, 20, 40, 60, 120)", "(12, 20, 40, 120)")]
_IN_PIECES = "        for hidden in batch.split(self.split_size):\n"
_COPY_STREAMS = "            with self.out, self.into:\n"
_ARRIVED = "            current(there).wait_stream(self.into)\n"
_FREE_LAUNCHES = (
    "vgpu.record(**costs, kernel_s=0, python_launch_s=0, engine_launch_s=0) as timeline:\n"
    "            train("
)

BROKEN = [
    Broken(
        "D07",
        "the batch is sent in one piece",
        expensive=True,
        old=_IN_PIECES,
        new="        for hidden in [batch]:\n",
        shorter=_PUBLISHED_SIZES,
    ),
    Broken(
        "D07",
        "the loop waits for each piece, forward and backward",
        expensive=True,
        old=_IN_PIECES,
        new=_IN_PIECES
        + "            hidden.requires_grad_().register_hook(lambda g: torch.accelerator.synchronize(g.device))\n",
        further=[
            (
                "            outputs.append(hidden)\n        return",
                "            outputs.append(hidden)\n            torch.accelerator.synchronize(hidden.device)\n        return",
            )
        ],
        shorter=_PUBLISHED_SIZES,
    ),
    Broken(
        "D08",
        "both stages are on one GPU, so neither waits",
        expensive=True,
        old="pipeline(halves(), gpus, size)",
        new="pipeline(halves(), gpus[:1] * 2, size)",
        shorter=_FEW_SIZES,
    ),
    Broken(
        "D09",
        "the loop waits for each piece",
        expensive=True,
        old="            outputs.append(hidden)\n        return",
        new="            outputs.append(hidden)\n            torch.accelerator.synchronize(hidden.device)\n        return",
    ),
    Broken(
        "D10",
        "a copy waits for nothing",
        cell="copy-in-both",
        old="            x.to(lab.devices[1])\n",
        new="            with torch.Stream(lab.devices[0]), torch.Stream(lab.devices[1]):\n                x.to(lab.devices[1])\n",
    ),
    Broken(
        "D10",
        "the copy's reader needs no wait, since Python waits",
        cell="race",
        old="            used = moved + 0",
        new="            torch.accelerator.synchronize(there)\n            used = moved + 0",
    ),
    Broken(
        "A33",
        "the batches are prefetched on the default stream",
        old="default, side = current(weight.device), torch.Stream(weight.device)",
        new="default = side = current(weight.device)",
    ),
    Broken(
        "A33",
        "nothing is pinned",
        old="batches = [batch.pin_memory() for batch in batches] if pinned else batches",
        new="batches = list(batches)",
    ),
    Broken(
        "D08",
        "small pieces cost nothing: free launches, and unlimited memory bandwidth",
        expensive=True,
        old="vgpu.record(**costs) as timeline:\n            train(",
        new=_FREE_LAUNCHES,
        further=[
            (
                "with vgpu.enable(count, gpu=gpu, link=link) as lab",
                "from dataclasses import replace\n"
                "    gpu = replace(vgpu.get_spec(gpu), memory_bandwidth_bytes_per_s=1e18)\n"
                "    with vgpu.enable(count, gpu=gpu, link=link) as lab",
            )
        ],
        shorter=_FEW_SIZES,
    ),
    Broken(
        "D11",
        "copies run on the compute streams",
        cell="gain",
        old=_COPY_STREAMS,
        new="            if True:\n",
    ),
    Broken("D11", "nothing waits for a copy", cell="gain", old=_ARRIVED, new=""),
]
