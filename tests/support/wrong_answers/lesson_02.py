"""Typical mistakes in lesson 02's exercises, and the message that each must get."""

from wrong_answers import template

_LOSS = """
def loss_today(weight, images, labels):
    images = images / images.abs().max()
    hidden = torch.tanh(images @ weight)
    {edit}
    return F.cross_entropy(hidden, labels)
"""

_meter = template(
    """
class RunningMean:
    def __init__(self):
        self.total, self.count = 0.0, 0

    def update(self, loss, count):
        {update}
        self.count += count

    def mean(self):
        {mean}
""",
    mean="return float(self.total / self.count)",
)

_head = template(
    """
def head_loss(backbone, head, images, labels):
    with {block}:
        features = backbone(images){end}
    return F.cross_entropy(head(features), labels)
""",
    block="torch.no_grad()",
    end="",
)


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
            _LOSS.format(edit="hidden = hidden.clone(); hidden.data[hidden.data.abs() < 0.1] = 0"),
            "edit is hidden from autograd",
        ),
        (
            _LOSS.format(edit="hidden = hidden.masked_fill(hidden.abs() < 0.1, 0).detach()"),
            "cuts the graph",
        ),
        (_LOSS.format(edit="pass"), "only the gradient of loss_2017 was wrong"),
        (
            _LOSS.format(edit="hidden = hidden * (hidden.abs() >= 0.1)").replace(
                ".abs().max()", ".max()"
            ),
            "even for negative pixel values",
        ),
        (
            _LOSS.format(
                edit="hidden = hidden.detach() * (hidden.abs() >= 0.1) + 0 * hidden.sum()"
            ),
            "The gradient of weight is wrong",
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
            _meter(
                update="self.total = self.total + loss * count",
                mean="return (self.total / self.count).item()",
            ),
            "holds a tensor with history",
        ),
        (
            _meter(
                update="self.total = self.total + loss.detach() * count",
                mean="return self.total / self.count",
            ),
            "not a tensor",
        ),
        (_meter(update="self.total += loss.item()"), "Weight each batch"),
        (
            _meter(update="self.total += loss.detach().mul_(count).item()"),
            "changed the caller's loss",
        ),
        (_meter(update="self.total += loss.detach_().item() * count"), "lost its graph"),
    ],
    "2.3": [
        (_head(block="torch.enable_grad()", end=".detach()"), "comes too late"),
        (_head(block="torch.inference_mode()"), "can't be saved"),
        (
            _head(end="; images = head(features)").replace(
                "head(features), labels", "images, labels"
            ),
            "outside the block",
        ),
        (_head(end="\n    torch.set_grad_enabled(False)"), "as a function, stays"),
        (_head(end="; backbone.requires_grad_(False)"), "for good"),
        (_head().replace("labels)\n", "labels).item()\n"), "Return the loss itself"),
        (_head(end=" * 2"), "cross-entropy of head"),
    ],
}
