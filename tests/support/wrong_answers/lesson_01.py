"""Typical mistakes in lesson 01's exercises, and the message that each must get."""

from wrong_answers import template

_TENSOR = "if isinstance(batch, torch.Tensor):\n        return batch.to(device)"
_DICT = (
    "if isinstance(batch, dict):\n"
    "        return {key: to_device(part, device) for key, part in batch.items()}"
)


def _moving(*steps, last="return batch"):
    return "\n    ".join(["def to_device(batch, device):", *steps, last]) + "\n"


def _parts(kinds, made):
    return f"if isinstance(batch, {kinds}):\n        return {made}"


_script = template(
    """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        {mean}
    def forward(self, images):
        return self.linear(images - {centered})
def run(model, images, labels, device):
    {first}
    weights = torch.tensor([1.0, 2.0, 1.0]{weights})
    loss = F.cross_entropy(model({images}), {labels}, {weighted})
    {last}
""",
    mean='self.register_buffer("mean", torch.full((4,), 0.5))',
    centered="self.mean",
    first="model.to(device)",
    weights=", device=device",
    images="images.to(device)",
    labels="labels.to(device)",
    weighted="weight=weights",
    last="return loss.detach().cpu().numpy()",
)
_ON_THE_CPU = {"first": "", "weights": "", "images": "images", "labels": "labels"}


WRONG = {
    "1.1": [
        # The moved tensor is dropped.
        (
            _moving("if isinstance(batch, torch.Tensor):\n        batch.to(device)"),
            "keep what it returns",
        ),
        # Always moves to the first GPU.
        (
            _moving(last="return batch.to(devices.lab(2)[0])"),
            "goes to the device that was passed",
        ),
        # Hard-codes one kind of GPU.
        (_moving(last="return batch.to('gpu:1')"), "Move a tensor to the device"),
        # Accepts anything with a method of that name.
        (
            _moving(
                "if hasattr(batch, 'to'):\n        return batch.to(device)",
                _DICT,
                "if isinstance(batch, (list, tuple)):\n"
                "        moved = [to_device(part, device) for part in batch]\n"
                "        return type(batch)(*moved) if hasattr(batch, '_fields') else type(batch)(moved)",
            ),
            "return it unchanged",
        ),
        # A copy where none is needed.
        (
            _moving(_parts("torch.Tensor", "batch.to(device, copy=True)")),
            "on the device, .to(device) returns that tensor",
        ),
        # By way of the CPU: two copies from one GPU to the other.
        (
            _moving(
                _parts(
                    "torch.Tensor", "batch if batch.device == device else batch.cpu().to(device)"
                ),
                _parts("list", "[to_device(part, device) for part in batch]"),
            ),
            "one copy",
        ),
        # Tuples become lists.
        (
            _moving(
                _TENSOR, _parts("(list, tuple)", "[to_device(part, device) for part in batch]")
            ),
            "Keep the type of each container",
        ),
        # Dicts are forgotten.
        (
            _moving(
                _TENSOR,
                _parts("(list, tuple)", "type(batch)(to_device(part, device) for part in batch)"),
            ),
            "A dict has no .to()",
        ),
        # The dict that was passed in is modified.
        (
            _moving(
                _TENSOR,
                _parts("(list, tuple)", "type(batch)([to_device(part, device) for part in batch])"),
                "if isinstance(batch, dict):\n"
                "        for key in batch:\n"
                "            batch[key] = to_device(batch[key], device)",
            ),
            "don't write into the old ones",
        ),
        # A namedtuple created like a tuple.
        (
            _moving(
                _TENSOR,
                _DICT,
                _parts("list", "[to_device(part, device) for part in batch]"),
                _parts("tuple", "tuple(to_device(part, device) for part in batch)"),
            ),
            "type(batch)(*moved)",
        ),
        # Everything becomes a tensor.
        (
            _moving(
                _TENSOR,
                _DICT,
                _parts("(list, tuple)", "type(batch)([to_device(part, device) for part in batch])"),
                _parts("str", "batch"),
                last="return batch if batch is None else torch.tensor(batch).to(device)",
            ),
            "return it unchanged",
        ),
    ],
    "1.2": [
        # Only the function, without the class.
        ("Net = None\ndef run(*args):\n    return 0.0\n", "Pass both names"),
        # The unchanged script, without the raise: the first error that it meets.
        (
            _script(
                mean="self.mean = torch.full((4,), 0.5)",
                first="model.to(device)\n    images.to(device)\n    labels.to(device)",
                weights="",
                images="images",
                labels="labels",
                last="return loss.detach().numpy()",
            ),
            "same device",
        ),
        # The plain attribute is moved by hand on every call.
        (
            _script(
                mean="self.mean = torch.full((4,), 0.5)", centered="self.mean.to(images.device)"
            ),
            "register_buffer",
        ),
        # A parameter moves, too, but it would be trained.
        (_script(mean="self.mean = nn.Parameter(torch.full((4,), 0.5))"), "mean is a parameter"),
        # The mean is gone, and the fault with it.
        (_script(mean="", centered="0.5"), "mean is gone"),
        # There's no error anymore, since everything stays on the CPU.
        (
            _script(**_ON_THE_CPU, last="return loss.detach().numpy()"),
            "The entire model must be on the device",
        ),
        # Computed on the CPU, and moved afterward for show.
        (
            _script(**_ON_THE_CPU, last="model.to(device)\n    return loss.detach().numpy()"),
            "on the requested device",
        ),
        # The weights are dropped, and the error with them.
        (_script(weighted=""), "centering by `mean` as in the script"),
        # A Python number instead of NumPy's.
        (_script(last="return loss.item()"), "as a NumPy array"),
    ],
    "1.3": [
        # The numbers do not change.
        ("def physical(visible, ordinal, cards):\n    return ordinal\n", "counted from 0"),
        # The unset variable is forgotten.
        (
            "def physical(visible, ordinal, cards):\n"
            "    seen = [int(text) for text in (visible or '').split(',') if text]\n"
            "    return seen[ordinal] if ordinal < len(seen) else None\n",
            "isn't set",
        ),
        # Set but empty is treated as unset.
        (
            "def physical(visible, ordinal, cards):\n"
            "    seen = [int(t) for t in visible.split(',')] if visible else list(range(cards))\n"
            "    return seen[ordinal] if ordinal < len(seen) else None\n",
            "hides every card",
        ),
        # The answer as a string.
        (
            "def physical(visible, ordinal, cards):\n"
            "    seen = visible.split(',') if visible else []\n"
            "    return seen[ordinal] if ordinal < len(seen) else None\n",
            "expected",
        ),
    ],
}
