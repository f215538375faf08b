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

_FIT = """
def fit_today(model, batches, held_out, rate):
    optimizer = optim.SGD(model.parameters(), lr=rate)
    model.train()
    total = held_out_loss = 0
    for images, labels in batches:
        {loss}
        optimizer.zero_grad()
        loss.backward()
        {clip}
        optimizer.step()
        total += loss.item()
    {evaluate}
        for images, labels in held_out:
            loss = F.cross_entropy(model(images), labels, reduction="sum")
            held_out_loss += {add}
    return total, held_out_loss
"""


def _fit(**parts):
    usual = {
        "loss": 'loss = F.cross_entropy(model(images), labels, reduction="sum")',
        "clip": "nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        "evaluate": "model.eval()\n    with torch.no_grad():",
        "add": "loss.item()",
    }
    return _FIT.format(**{**usual, **parts})


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
        ("fit_today = fit_2017", "0-dim"),
        (_fit(evaluate="model.eval()\n    if True:"), "no_grad"),
        (_fit(evaluate="with torch.no_grad():"), "does not replace model.eval()"),
        (_fit().replace("model.train()", "pass"), "switch it, as the old script does"),
        (_fit(add="loss"), "two Python numbers"),
        (_fit().replace("+= loss.item()", "+= float(loss)", 1), "drops the history without a word"),
        # Again: C++ has given its warning by now.
        (_fit(loss="loss = F.cross_entropy(model(images), labels)"), "a sum over the batch"),
        (
            _fit(
                loss="loss = F.nll_loss(F.log_softmax(model(images), 0), labels, reduction='sum')"
            ),
            "dim 1",
        ),
        (
            _fit(loss="loss = F.nll_loss(F.log_softmax(model(images)), labels, reduction='sum')"),
            "names the old word",
        ),
        (_fit(clip="pass"), "each of its steps"),
        (
            _fit(evaluate="model.eval()\n    torch.set_grad_enabled(False)\n    if True:"),
            "as a function stays",
        ),
    ],
}
