"""Typical mistakes in the exercises of lesson 05, and what the learner must be told."""

import re

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


_with_loss = template(
    """
class WithLoss(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = {module}

    def forward(self, batch, labels):
        return {loss}
""",
    module="module",
    loss="F.cross_entropy(self.module(batch), labels, reduction='sum').unsqueeze(0)",
)

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
            "differs from what a single GPU computes for the full batch",
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
        (_with_loss(loss="self.module(batch)"), "compute the loss in forward"),
        (
            _with_loss(loss="F.cross_entropy(self.module(batch), labels, reduction='none')"),
            "One value from each GPU",
        ),
        (
            _with_loss(loss="F.cross_entropy(self.module(batch), labels, reduction='sum')"),
            "add one with unsqueeze(0)",
        ),
        (
            _with_loss(loss="F.cross_entropy(self.module(batch), labels).unsqueeze(0)"),
            "the mean of the means is wrong",
        ),
        (
            _with_loss(loss="F.cross_entropy(self.module(batch), labels, reduction='sum').item()"),
            "don't call .item()",
        ),
        (
            _with_loss(
                loss="F.cross_entropy(self.module(batch).detach(), labels, reduction='sum')[None]"
            ),
            "Don't detach the loss",
        ),
        (
            _with_loss(
                loss="F.cross_entropy(self.module(batch), 0 * labels, reduction='sum')[None]"
            ),
            # By chance, this loss may be close enough; the gradients never are.
            re.compile(
                "of the module's outputs, summed over the chunk|differs from that of the mean"
            ),
        ),
        (
            # Right, but GPU 0 computes every loss.
            _with_loss(
                loss="F.cross_entropy(\n"
                "            self.module(batch).to(gpus[0]), labels.to(gpus[0]), reduction='sum'\n"
                "        ).unsqueeze(0)"
            ),
            "Compute each loss where the outputs are",
        ),
        (
            _with_loss(module="__import__('copy').deepcopy(module)"),
            "must go through self.module",
        ),
        ("def WithLoss(module):\n    return F.cross_entropy", "Pass the class WithLoss"),
    ],
    "5.4": [
        (_LOAD.format(body="pass", strict=""), "Missing key(s)"),
        (_LOAD.format(body="pass", strict=", strict=False"), "don't match those in the state"),
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
