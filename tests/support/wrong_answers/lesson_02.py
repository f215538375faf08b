"""Typical mistakes in lesson 02, with a phrase of the hint that each must get."""

_LOSS = """
def loss_today(weight, images, labels):
    images = images / images.abs().max()
    hidden = torch.tanh(images @ weight)
    {edit}
    return F.cross_entropy(hidden, labels)
"""

_METER = """
class RunningMean:
    def __init__(self):
        self.total, self.count = 0.0, 0

    def update(self, loss, count):
        {update}
        self.count += count

    def mean(self):
        {mean}
"""

_EVALUATE = """
def evaluate(model, batches):
    mode = model.training
    {before}
    with {block}:
        loss = right = count = 0
        for images, labels in batches:
            scores = model(images)
            loss += F.cross_entropy(scores, labels, reduction="sum"){item}
            right += (scores.argmax(1) == labels).sum().item()
            count += {count}
    {after}
    return loss / count, right / count
"""


def _evaluate(**parts):
    usual = {
        "before": "model.eval()",
        "block": "torch.no_grad()",
        "item": ".item()",
        "count": "len(labels)",
        "after": "model.train(mode)",
    }
    return _EVALUATE.format(**{**usual, **parts})


_BY_COUNT = "return float(self.total / self.count)"

WRONG = {
    "2.1": [
        (
            "def loss_today(weight, images, labels):\n    return loss_2017(weight, images, labels)",
            "one edit is hidden from autograd",
        ),
        (
            _LOSS.format(edit="hidden.detach()[hidden.detach().abs() < 0.1] = 0"),
            "Make a new tensor",
        ),
        (
            _LOSS.format(edit="hidden = hidden.masked_fill(hidden.abs() < 0.1, 0).detach()"),
            "cut off",
        ),
        (_LOSS.format(edit="pass"), "Only its gradient was wrong"),
        (
            _LOSS.format(edit="hidden = hidden * (hidden.abs() >= 0.1)").replace(
                ".abs().max()", ".max()"
            ),
            "for images below 0 as well",
        ),
        (
            _LOSS.format(
                edit="hidden = hidden.detach() * (hidden.abs() >= 0.1) + 0 * hidden.sum()"
            ),
            "The gradient of weight is off",
        ),
        (
            "def loss_today(weight, images, labels):\n"
            "    images /= images.abs().max()\n"
            "    hidden = torch.tanh(images @ weight)\n"
            "    return F.cross_entropy(hidden * (hidden.abs() >= 0.1), labels)",
            "changed its arguments",
        ),
        (
            "def loss_today(weight, images, labels):\n"
            "    return loss_2017(weight, images, labels).item()",
            "Return the loss itself",
        ),
    ],
    "2.2": [
        (
            _METER.format(
                update="self.total = self.total + loss * count",
                mean="return (self.total / self.count).item()",
            ),
            "holds a tensor with history",
        ),
        (
            _METER.format(
                update="self.total = self.total + loss.detach() * count",
                mean="return self.total / self.count",
            ),
            "not a tensor",
        ),
        (_METER.format(update="self.total += loss.item()", mean=_BY_COUNT), "Weigh each batch"),
        (
            _METER.format(update="self.total += loss.detach().mul_(count).item()", mean=_BY_COUNT),
            "changed the caller's loss",
        ),
        (
            _METER.format(update="self.total += loss.detach_().item() * count", mean=_BY_COUNT),
            "lost its graph",
        ),
    ],
    "2.3": [
        (_evaluate(block="torch.enable_grad()"), "eval() leaves recording on"),
        (_evaluate(before="pass"), "does not replace model.eval()"),
        (_evaluate(after="pass"), "Note model.training first"),
        (_evaluate(after="model.train()"), "Note model.training first"),
        (_evaluate(item=""), ".item() makes a number"),
        (_evaluate(count="1"), "over samples, not over batches"),
        (
            _evaluate(
                before="model.eval(); torch.set_grad_enabled(False)", block="torch.no_grad()"
            ),
            "as a function stays",
        ),
        (_evaluate(before="model.eval(); model(batches[0][0])"), "Go once over the batches"),
    ],
}
