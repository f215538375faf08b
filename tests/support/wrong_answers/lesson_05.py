"""Typical mistakes in the exercises of lesson 05, and what the learner must be told."""

from wrong_answers import template

_counter = template(
    """
class CountingModel(nn.Module):
    def __init__(self):
        super().__init__()
        {init}

    def forward(self, x):
        {count}
        return x * 2
"""
)


_STEP = """
class Inside(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x, y):
        return F.cross_entropy(self.module(x), y, reduction="{reduction}").unsqueeze(0)

def lean_step(module, batch, labels, gpus):
    losses = nn.DataParallel(Inside(module), gpus)(batch, labels)
    losses.{join}().backward()
"""

_LOAD = """
def load_any(model, state):
    {body}
    model.load_state_dict(state{strict})
    return "as is"
"""

_parts = template(
    """
def data_parallel(module, batch, gpus):
    chunks = scatter(batch, gpus)
    replicas = {replicas}
    outputs = {outputs}
    return {result}
""",
    replicas="replicate(module, gpus[: len(chunks)])",
    outputs="parallel_apply(replicas, chunks)",
    result="gather(outputs, gpus[0])",
)


WRONG = {
    "5.1": [
        (
            "def data_parallel(module, batch, gpus):\n"
            "    return nn.DataParallel(module, gpus)(batch)",
            "its four parts",
        ),
        ("def data_parallel(module, batch, gpus):\n    return module(batch)", "its own chunk once"),
        (_parts(replicas="replicate(module, gpus)"), "as many replicas as chunks"),
        (_parts(replicas="replicate(module, gpus)[: len(chunks)]"), "shorten the list first"),
        (_parts(result="outputs"), "Return what gather returns"),
        (_parts(result="gather(outputs, gpus[1])"), "on which the outputs are joined"),
        (
            _parts(replicas="torch.no_grad()(replicate)(module, gpus[: len(chunks)])"),
            "gradients enabled",
        ),
        (
            _parts(result="gather(outputs[::-1], gpus[0])"),
            "differs from a single GPU's on the full batch",
        ),
        (
            _parts(outputs="[replica(chunk) for replica, chunk in zip(replicas, chunks)]"),
            "parallel_apply starts the threads",
        ),
        (
            _parts(replicas="replicate(module, gpus[: len(chunks)], detach=True)"),
            "is everything in the graph?",
        ),
    ],
    "5.3": [
        (_counter(init="self.calls = 0", count="self.calls += 1"), "thrown away"),
        (
            _counter(
                init="self.register_buffer('calls', torch.zeros(()))",
                count="self.calls = self.calls + 1",
            ),
            "change the buffer in place",
        ),
        (
            _counter(init="self.calls = [0]", count="self.calls[0] += 1"),
            "compares int(model.calls)",
        ),
        (
            _counter(init="self.calls = torch.zeros(())", count="self.calls.add_(1)"),
            "once per replica",
        ),
        (_counter(init="self.calls = 3", count="pass"), "expected"),
        *(
            (
                _counter(init="self.register_buffer('calls', torch.zeros(()))", count=count),
                "wherever it runs",
            )
            for count in (
                "self.calls += x.device.index == 0",
                "if x.is_cpu: pass\n        else: self.calls += 1",
            )
        ),
    ],
    "5.2": [
        (
            "def lean_step(module, batch, labels, gpus):\n"
            "    F.cross_entropy(nn.DataParallel(module, gpus)(batch), labels).backward()",
            "Return the loss from forward",
        ),
        (_STEP.format(reduction="mean", join="mean"), "mean of the means"),
        (_STEP.format(reduction="sum", join="sum"), "divide once"),
        (_STEP.format(reduction="mean", join="sum"), "It's 2 times as large"),
        (
            "def lean_step(module, batch, labels, gpus):\n"
            "    F.cross_entropy(module(batch), labels).backward()",
            "Split the batch",
        ),
        (
            "def lean_step(module, batch, labels, gpus):\n"
            "    chunks, parts = scatter(batch, gpus), scatter(labels, gpus)\n"
            "    outputs = parallel_apply(replicate(module, gpus), chunks)\n"
            "    sums = [F.cross_entropy(o, y, reduction='sum') for o, y in zip(outputs, parts)]\n"
            "    (sum(each.to(gpus[0]) for each in sums) / len(batch)).backward()",
            "something still refers to its outputs",
        ),
        (
            # The loss is in forward; .grad is held while the next gradients arrive.
            _STEP.format(reduction="sum", join="sum").replace(
                "    losses = nn.DataParallel(Inside(module), gpus)(batch, labels)\n"
                "    losses.sum().backward()",
                "    parallel = nn.DataParallel(Inside(module), gpus)\n"
                "    for x, y in zip(batch.chunk(4), labels.chunk(4)):\n"
                "        (parallel(x, y).sum() / len(batch)).backward()",
            ),
            "8 forward passes in one step",
        ),
        ("def lean_step(module, batch, labels, gpus):\n    pass", "no gradient"),
    ],
    "5.4": [
        (_LOAD.format(body="pass", strict=""), "Missing key(s)"),
        (_LOAD.format(body="pass", strict=", strict=False"), "don't match the state's"),
        (
            "def load_any(model, state):\n"
            "    bare = model.module if isinstance(model, nn.DataParallel) else model\n"
            "    for name in list(state):\n"
            "        state[name.removeprefix('module.')] = state.pop(name)\n"
            "    bare.load_state_dict(state)\n"
            "    return 'as is'",
            "state passed in was changed",
        ),
        (
            "def load_any(model, state):\n"
            "    bare = model.module if isinstance(model, nn.DataParallel) else model\n"
            "    state = {k.removeprefix('module.'): v for k, v in state.items()}\n"
            "    bare.load_state_dict(state)\n"
            "    return 'done'",
            "in exactly these words",
        ),
        (
            # A bare model may have a part called module, too.
            "def load_any(model, state):\n"
            "    bare = getattr(model, 'module', model)\n"
            "    bare.load_state_dict({k.removeprefix('module.'): v for k, v in state.items()})\n"
            "    return 'prefix removed'",
            'exactly one "module."',
        ),
        (
            # Only looks at the names: a bare model may have one part, called module.
            "def load_any(model, state):\n"
            "    wrapped = isinstance(model, nn.DataParallel)\n"
            "    prefixed = all(k.startswith('module.') for k in state)\n"
            "    did = 'as is'\n"
            "    if prefixed and not wrapped:\n"
            "        state, did = {k[7:]: v for k, v in state.items()}, 'prefix removed'\n"
            "    elif wrapped and not prefixed:\n"
            "        state, did = {'module.' + k: v for k, v in state.items()}, 'prefix added'\n"
            "    model.load_state_dict(state)\n"
            "    return did",
            "if the model's own keys differ from the state's",
        ),
    ],
}
