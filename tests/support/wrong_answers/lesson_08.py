"""Typical mistakes in lesson 08's exercises, and the message that each must get."""

from wrong_answers import template

_EVEN = """
def balanced_cut(layers, batch, gpus):
    sizes, hidden = [], batch
    for layer in layers:
        hidden = layer(hidden)
        sizes.append({size})
    return min(range(1, len(layers)), key=lambda k: max(sum(sizes[:k]), sum(sizes[k:])))
"""

_losses = template(
    """
def two_losses(main, auxiliary, labels):
    main_loss = F.cross_entropy({main}, labels.to({main_labels}))
    auxiliary_loss = F.cross_entropy({auxiliary}, labels.to({auxiliary_labels}))
    return {result}
""",
    main="main",
    auxiliary="auxiliary",
    main_labels="main.device",
    auxiliary_labels="auxiliary.device",
    result="main_loss + 0.3 * auxiliary_loss.to(main_loss.device)",
)


_staged = template(
    """
class Staged(nn.Module):
    def __init__(self, stages, gpus):
        super().__init__()
        self.stages, self.gpus = {stages}, gpus

    def forward(self, batch):
        hidden = batch
        for stage, gpu in zip(self.stages, self.gpus):
            hidden = stage({hidden})
        return hidden
""",
    stages="nn.ModuleList(s.to(g) for s, g in zip(stages, gpus))",
    hidden="hidden.to(gpu)",
)

_ERROR = (
    "math.sqrt(statistics.variance(first) / len(first) + statistics.variance(second) / len(second))"
)
_compare = template(
    """
def compare(first, second):
    gap = statistics.mean(second) - statistics.mean(first)
    error = {error}
    if abs(gap) <= 2 * error:
        return "cannot tell"
    return {said}
""",
    error=_ERROR,
    said='"slower" if gap > 0 else "faster"',
)

WRONG = {
    "8.1": [
        (_staged(stages="[s.to(g) for s, g in zip(stages, gpus)]"), "nn.ModuleList"),
        (_staged(hidden="hidden"), "same device"),
        (_staged(hidden="hidden.detach().to(gpu)"), "cuts the graph"),
        (
            _staged(
                stages="nn.ModuleList(s.to(gpus[0]) for s in stages)",
                hidden="hidden.to(self.gpus[0])",
            ),
            "Stage i belongs on gpus[i]",
        ),
        (
            "class Staged(nn.Module):\n"
            "    def __init__(self, stages, gpus):\n"
            "        super().__init__()\n"
            "        self.a, self.b, self.c = (s.to(g) for s, g in zip(stages, gpus))\n"
            "        self.gpus = gpus\n"
            "    def forward(self, x):\n"
            "        a, b, c = self.gpus\n"
            "        return self.c(self.b(self.a(x.to(a)).to(b)).to(c))",
            "not enough values to unpack",
        ),
        (_staged().replace("return hidden", "pass"), "forward must return"),
    ],
    "8.2": [
        (
            "def two_losses(main, auxiliary, labels):\n"
            "    labels, moved = labels.to(auxiliary.device), main.to(auxiliary.device)\n"
            "    loss = F.cross_entropy(moved, labels) + 0.3 * F.cross_entropy(auxiliary, labels)\n"
            "    return loss.to(main.device)",
            "the main outputs are copied away",
        ),
        (_losses(result="main_loss, 0.3 * auxiliary_loss"), "Return the sum"),
        (_losses(result="main_loss + 0.3 * auxiliary_loss"), "add the losses on"),
        (
            _losses(
                main="main.cpu()",
                auxiliary="auxiliary.cpu()",
                main_labels="'cpu'",
                auxiliary_labels="'cpu'",
            ),
            "Move the labels",
        ),
        (
            "def two_losses(main, auxiliary, labels):\n"
            "    def moved(row, label):\n"
            "        return F.cross_entropy(row.to(main.device), label.to(main.device))\n"
            "    second = sum(map(moved, auxiliary, labels)) / len(labels)\n"
            "    return F.cross_entropy(main, labels.to(main.device)) + 0.3 * second",
            "the auxiliary outputs are copied away",
        ),
        (_losses(auxiliary_labels="main.device"), "same device"),
        (_losses(result="main_loss + 0.3 * auxiliary_loss.item()"), "cut the graph"),
        (
            _losses(result="main_loss.item() + 0.3 * auxiliary_loss.item()"),
            ".item() would detach it from the graph",
        ),
        (_losses(result="main_loss + auxiliary_loss.to(main.device)"), "0.3 * auxiliary"),
        (
            _losses(result="main_loss.to(auxiliary.device) + 0.3 * auxiliary_loss"),
            "not the other way",
        ),
    ],
    "8.3": [
        ("def balanced_cut(layers, batch, gpus):\n    return len(layers) // 2", "layers differ"),
        (_EVEN.format(size="sum(p.nbytes for p in layer.parameters())"), "only the parameters"),
        (_EVEN.format(size="hidden.nbytes"), "only the activations"),
        ("def balanced_cut(layers, batch, gpus):\n    return 3", "on the fuller GPU"),
        ("def balanced_cut(layers, batch, gpus):\n    return 0", "at least one"),
        ("def balanced_cut(layers, batch, gpus):\n    return layers[:3]", "how many layers"),
    ],
    "8.4": [
        (_compare(error="0"), "no more than two standard errors"),
        (
            _compare(error="statistics.stdev(first) + statistics.stdev(second)"),
            "its number of repeats",
        ),
        (_compare(said='"faster" if gap > 0 else "slower"'), "describes the second list"),
        (
            _compare(error=_ERROR.replace("variance", "pvariance")),
            "one less than the number of repeats",
        ),
        ("def compare(first, second):\n    return min(second) > min(first)", 'Return "slower"'),
    ],
}
