"""Typical mistakes in lesson 07's exercises, and the message that each must get."""

from wrong_answers import template

_AVERAGE = "dist.all_reduce(p.grad); p.grad /= dist.get_world_size()"
_SEND = "[dist.broadcast(t.detach(), src=0) for t in (*module.parameters(), *module.buffers())]"
# DDP in HandmadeDDP, with a communication hook that returns the bucket itself.
_PACKED = (
    "self.module = nn.parallel.DistributedDataParallel(module); "
    "self.module.register_comm_hook(None, lambda state, bucket: (bucket.buffer(),))"
)
_handmade = template(
    """
class HandmadeDDP(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        {start}
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self.hook)

    @staticmethod
    def hook(p):
        {hook}

    def forward(self, *inputs):
        return self.module(*inputs)
""",
    start=_SEND,
    hook=_AVERAGE,
)
_LOSS = "def loss_for_ddp(losses):\n    "
_COUNT = (
    "def loss_for_ddp(losses):\n"
    "    count = losses.new_tensor(len(losses))\n"
    "    dist.all_reduce(count)\n"
    "    return "
)
_SAMPLER = """
class ValidationSampler(Sampler):
    def __init__(self, data, num_replicas, rank):
        {indices}
    def __iter__(self):
        return {iterator}
    def __len__(self):
        return {length}
"""
_ACCUMULATE = """
def accumulate(parallel, micro_batches):
    for number, (x, y) in enumerate(micro_batches, start=1):
        {body}
"""


def _sampler(indices, iterator="iter(self.indices)", length="len(self.indices)"):
    return _SAMPLER.format(indices=f"self.indices = {indices}", iterator=iterator, length=length)


_LOSS_OF_ONE = "nn.functional.mse_loss(parallel(x), y) / len(micro_batches)"

WRONG = {
    "7.1": [
        (_handmade(start="pass"), "has its own value"),
        (
            _handmade(start="[dist.broadcast(p.detach(), src=0) for p in module.parameters()]"),
            "the buffer: rank",
        ),
        (
            _handmade(start="[dist.broadcast(t, src=0) for t in module.state_dict().values()]"),
            "module.buffers() doesn't",
        ),
        (_handmade(hook="dist.all_reduce(p.grad)"), "divide the sum"),
        (_handmade(hook="pass"), "averaged across all ranks"),
        (
            _handmade(hook=f"{_AVERAGE}; {_AVERAGE}"),
            "12: one per backward for each of the 4 parameters",
        ),
        (_handmade(hook="p.grad.zero_()"), "No parameter changed"),
        (_handmade(hook=f"{_AVERAGE}; return p.grad, p"), "a post-accumulate hook returns None"),
        (_handmade(start=f"{_SEND}; {_PACKED}", hook="pass"), "must return a future"),
        (
            _handmade(
                start="[dist.broadcast(t, src=0) for t in (*module.buffers(), *module.parameters())]"
            ),
            "send parameter.detach()",
        ),
        (
            _handmade(start=_SEND.replace("t.detach(),", "t.detach().cpu(),")),
            "broadcast was given a CPU tensor, and NCCL sends only tensors on the rank's GPU",
        ),
        ("HandmadeDDP = DDP", "write yours from broadcast"),
        ("def HandmadeDDP(module):\n    pass", "it must return a module"),
    ],
    "7.2": [
        (_LOSS + "return losses.mean()", "as much weight"),
        (_LOSS + "return losses.mean() * dist.get_world_size()", "usual mistake"),
        (_LOSS + "return losses.sum()", "These are sums"),
        (_LOSS + "return losses.sum() * dist.get_world_size()", "Nothing has been divided"),
        (
            _COUNT.replace("losses.new_tensor(", "torch.tensor(1.0 * ") + "losses.sum() / count",
            "all_reduce was given a CPU tensor",
        ),
        (_COUNT + "losses.sum() / count", "too small by that factor"),
        (_COUNT + "losses.mean() * count", "Compare with"),
        (
            _COUNT.replace(
                "return ", "losses = losses.sum()\n    dist.all_reduce(losses)\n    return "
            )
            + "losses / count * dist.get_world_size()",
            "without a graph, such as a count",
        ),
        (_COUNT + "losses", "raised RuntimeError: grad can be implicitly created"),
        (_COUNT + "losses.sum().item() / count.item()", "must return a tensor"),
        (_COUNT + "losses.sum().detach() / count", "does not require grad"),
        (_COUNT + "losses.sum() / cuont", "line 4 of your cell"),
        (
            _LOSS + "if dist.get_rank() == 0:\n        dist.all_reduce(losses.new_ones(1))\n"
            "    return losses.mean()",
            "not every rank returned",
        ),
        (_LOSS + "dist.all_reduce(losses)\n    return losses.mean()", "an answer from every rank"),
        ("loss_for_ddp = torch.tensor(1.0)", "Pass the function itself"),
    ],
    "7.3": [
        (
            "class ValidationSampler(DistributedSampler):\n"
            "    def __init__(self, data, num_replicas, rank):\n"
            "        super().__init__(data, num_replicas, rank, shuffle=False)",
            "Padding repeats",
        ),
        (
            "class ValidationSampler(DistributedSampler):\n"
            "    def __init__(self, data, num_replicas, rank):\n"
            "        super().__init__(data, num_replicas, rank, shuffle=False, drop_last=True)",
            "assigned to no rank",
        ),
        (_sampler("range(rank, len(data) - len(data) % num_replicas, num_replicas)"), "to no rank"),
        (_sampler("range(rank + 1, len(data) + 1, num_replicas)"), "don't exist"),
        (_sampler("range(len(data)) if rank == 0 else range(0)"), "slowest rank sets the pace"),
        (
            _sampler("iter(range(rank, len(data), num_replicas))", "self.indices", "0"),
            "len(sampler)",
        ),
        (
            _SAMPLER.format(
                indices="part = range(rank, len(data), num_replicas); "
                "self.size = len(part); self.walk = iter(part)",
                iterator="self.walk",
                length="self.size",
            ),
            "__iter__ must start over",
        ),
        (
            _sampler("random.sample(range(rank, len(data), num_replicas), 99)"),
            "name 'random' is not defined",
        ),
        ("ValidationSampler = [0, 4, 8]", "Pass the function itself"),
    ],
    "7.4": [
        (
            _ACCUMULATE.format(body=f"({_LOSS_OF_ONE}).backward()"),
            "DDP reduced after more than one",
        ),
        (
            _ACCUMULATE.format(
                body=f"with parallel.no_sync():\n            ({_LOSS_OF_ONE}).backward()"
            ),
            "DDP reduced nothing",
        ),
        (
            # Only the backward is inside no_sync.
            "from contextlib import nullcontext\n"
            + _ACCUMULATE.format(
                body=f"loss = {_LOSS_OF_ONE}\n"
                "        last = number == len(micro_batches)\n"
                "        with nullcontext() if last else parallel.no_sync():\n"
                "            loss.backward()"
            ),
            "forward decides",
        ),
        (
            "from contextlib import nullcontext\n"
            + _ACCUMULATE.format(
                body="last = number == len(micro_batches)\n"
                "        with nullcontext() if last else parallel.no_sync():\n"
                "            nn.functional.mse_loss(parallel(x), y).backward()"
            ),
            "times too large",
        ),
        (
            "from contextlib import nullcontext\n"
            + _ACCUMULATE.format(
                body="last = number == len(micro_batches)\n"
                "        with nullcontext() if last else parallel.no_sync():\n"
                f"            ({_LOSS_OF_ONE} / dist.get_world_size()).backward()"
            ),
            "already divides by the number of ranks",
        ),
        (
            # Only the last micro-batch counts.
            "def accumulate(parallel, micro_batches):\n"
            "    x, y = micro_batches[-1]\n"
            "    nn.functional.mse_loss(parallel(x), y).backward()",
            "Compare with the mean",
        ),
        (
            "def accumulate(parallel, micro_batches):\n"
            "    x, y = (torch.cat(part) for part in zip(*micro_batches))\n"
            "    nn.functional.mse_loss(parallel(x), y).backward()",
            "Merged micro-batches",
        ),
        (
            # Sent once, with separate micro-batches, but every graph is kept until the end.
            "def accumulate(parallel, micro_batches):\n"
            f"    sum({_LOSS_OF_ONE} for x, y in micro_batches).backward()",
            "a sum of losses keeps every graph",
        ),
        (
            # Right, but sent by hand.
            "def accumulate(parallel, micro_batches):\n"
            "    for x, y in micro_batches:\n"
            "        loss = nn.functional.mse_loss(parallel.module(x), y) / len(micro_batches)\n"
            "        loss.backward()\n"
            "    for parameter in parallel.parameters():\n"
            "        dist.all_reduce(parameter.grad)\n"
            "        parameter.grad /= dist.get_world_size()",
            "you reduced it yourself",
        ),
        ("def accumulate(parallel, micro_batches):\n    pass", "left no gradient"),
    ],
}
