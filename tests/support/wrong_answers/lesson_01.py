"""Typical wrong answers of lesson 01, and a phrase of the message that each must get."""

WRONG = {
    "1.1": [
        # The moved tensor is dropped.
        (
            "def to_device(batch, device):\n"
            "    if isinstance(batch, torch.Tensor):\n"
            "        batch.to(device)\n"
            "    return batch\n",
            "keep what it returns",
        ),
        # Always to the first GPU.
        (
            "def to_device(batch, device):\n    return batch.to(devices.lab(2)[0])\n",
            "the device that your function was given",
        ),
        # The name of a single kind of GPU.
        (
            "def to_device(batch, device):\n    return batch.to('gpu:1')\n",
            "Move a tensor to the device",
        ),
        # Anything with a method of that name.
        (
            "def to_device(batch, device):\n"
            "    if hasattr(batch, 'to'):\n"
            "        return batch.to(device)\n"
            "    if isinstance(batch, dict):\n"
            "        return {key: to_device(part, device) for key, part in batch.items()}\n"
            "    if isinstance(batch, (list, tuple)):\n"
            "        moved = [to_device(part, device) for part in batch]\n"
            "        return type(batch)(*moved) if hasattr(batch, '_fields') else type(batch)(moved)\n"
            "    return batch\n",
            "container unchanged",
        ),
        # A copy where none is needed.
        (
            "def to_device(batch, device):\n"
            "    if isinstance(batch, torch.Tensor):\n"
            "        return batch.to(device, copy=True)\n"
            "    return batch\n",
            "returns the tensor itself",
        ),
        # By way of the CPU: two copies from one GPU to the other.
        (
            "def to_device(batch, device):\n"
            "    if isinstance(batch, torch.Tensor):\n"
            "        return batch if batch.device == device else batch.cpu().to(device)\n"
            "    if isinstance(batch, list):\n"
            "        return [to_device(part, device) for part in batch]\n"
            "    return batch\n",
            "one copy",
        ),
        # Tuples become lists.
        (
            "def to_device(batch, device):\n"
            "    if isinstance(batch, torch.Tensor):\n"
            "        return batch.to(device)\n"
            "    if isinstance(batch, (list, tuple)):\n"
            "        return [to_device(part, device) for part in batch]\n"
            "    return batch\n",
            "Keep the kind of each container",
        ),
        # Dicts are forgotten.
        (
            "def to_device(batch, device):\n"
            "    if isinstance(batch, torch.Tensor):\n"
            "        return batch.to(device)\n"
            "    if isinstance(batch, (list, tuple)):\n"
            "        return type(batch)(to_device(part, device) for part in batch)\n"
            "    return batch\n",
            "A dict has no .to()",
        ),
        # The dict that was passed in is modified.
        (
            "def to_device(batch, device):\n"
            "    if isinstance(batch, torch.Tensor):\n"
            "        return batch.to(device)\n"
            "    if isinstance(batch, (list, tuple)):\n"
            "        return type(batch)([to_device(part, device) for part in batch])\n"
            "    if isinstance(batch, dict):\n"
            "        for key in batch:\n"
            "            batch[key] = to_device(batch[key], device)\n"
            "    return batch\n",
            "don't write into the old ones",
        ),
        # A namedtuple created like a tuple.
        (
            "def to_device(batch, device):\n"
            "    if isinstance(batch, torch.Tensor):\n"
            "        return batch.to(device)\n"
            "    if isinstance(batch, dict):\n"
            "        return {key: to_device(part, device) for key, part in batch.items()}\n"
            "    if isinstance(batch, list):\n"
            "        return [to_device(part, device) for part in batch]\n"
            "    if isinstance(batch, tuple):\n"
            "        return tuple(to_device(part, device) for part in batch)\n"
            "    return batch\n",
            "type(batch)(*moved)",
        ),
        # Everything becomes a tensor.
        (
            "def to_device(batch, device):\n"
            "    if isinstance(batch, torch.Tensor):\n"
            "        return batch.to(device)\n"
            "    if isinstance(batch, dict):\n"
            "        return {key: to_device(part, device) for key, part in batch.items()}\n"
            "    if isinstance(batch, (list, tuple)):\n"
            "        return type(batch)([to_device(part, device) for part in batch])\n"
            "    if isinstance(batch, str) or batch is None:\n"
            "        return batch\n"
            "    return torch.tensor(batch).to(device)\n",
            "container unchanged",
        ),
    ],
    "1.2": [
        # Only the function, without the class.
        ("Net = None\ndef run(*args):\n    return 0.0\n", "Pass both names"),
        # The unchanged script, without the raise: the first error that it meets.
        (
            "class Net(nn.Module):\n"
            "    def __init__(self):\n"
            "        super().__init__()\n"
            "        self.linear = nn.Linear(4, 3)\n"
            "        self.mean = torch.full((4,), 0.5)\n"
            "    def forward(self, images):\n"
            "        return self.linear(images - self.mean)\n"
            "def run(model, images, labels, device):\n"
            "    model.to(device)\n"
            "    images.to(device)\n"
            "    labels.to(device)\n"
            "    weights = torch.tensor([1.0, 2.0, 1.0])\n"
            "    loss = F.cross_entropy(model(images), labels, weight=weights)\n"
            "    return loss.detach().numpy()\n",
            "same device",
        ),
        # The plain attribute is moved by hand on every call.
        (
            "class Net(nn.Module):\n"
            "    def __init__(self):\n"
            "        super().__init__()\n"
            "        self.linear = nn.Linear(4, 3)\n"
            "        self.mean = torch.full((4,), 0.5)\n"
            "    def forward(self, images):\n"
            "        return self.linear(images - self.mean.to(images.device))\n"
            "def run(model, images, labels, device):\n"
            "    model.to(device)\n"
            "    weights = torch.tensor([1.0, 2.0, 1.0], device=device)\n"
            "    logits = model(images.to(device))\n"
            "    loss = F.cross_entropy(logits, labels.to(device), weight=weights)\n"
            "    return loss.detach().cpu().numpy()\n",
            "register_buffer",
        ),
        # A parameter moves, too, but it would be trained.
        (
            "class Net(nn.Module):\n"
            "    def __init__(self):\n"
            "        super().__init__()\n"
            "        self.linear = nn.Linear(4, 3)\n"
            "        self.mean = nn.Parameter(torch.full((4,), 0.5))\n"
            "    def forward(self, images):\n"
            "        return self.linear(images - self.mean)\n"
            "def run(model, images, labels, device):\n"
            "    model.to(device)\n"
            "    weights = torch.tensor([1.0, 2.0, 1.0], device=device)\n"
            "    logits = model(images.to(device))\n"
            "    loss = F.cross_entropy(logits, labels.to(device), weight=weights)\n"
            "    return loss.detach().cpu().numpy()\n",
            "mean is a parameter",
        ),
        # The mean is gone, and the fault with it.
        (
            "class Net(nn.Module):\n"
            "    def __init__(self):\n"
            "        super().__init__()\n"
            "        self.linear = nn.Linear(4, 3)\n"
            "    def forward(self, images):\n"
            "        return self.linear(images - 0.5)\n"
            "def run(model, images, labels, device):\n"
            "    model.to(device)\n"
            "    weights = torch.tensor([1.0, 2.0, 1.0], device=device)\n"
            "    logits = model(images.to(device))\n"
            "    loss = F.cross_entropy(logits, labels.to(device), weight=weights)\n"
            "    return loss.detach().cpu().numpy()\n",
            "mean is gone",
        ),
        # No error any more, since everything stays on the CPU.
        (
            "class Net(nn.Module):\n"
            "    def __init__(self):\n"
            "        super().__init__()\n"
            "        self.linear = nn.Linear(4, 3)\n"
            '        self.register_buffer("mean", torch.full((4,), 0.5))\n'
            "    def forward(self, images):\n"
            "        return self.linear(images - self.mean)\n"
            "def run(model, images, labels, device):\n"
            "    weights = torch.tensor([1.0, 2.0, 1.0])\n"
            "    loss = F.cross_entropy(model(images), labels, weight=weights)\n"
            "    return loss.detach().numpy()\n",
            "The whole model stays on the device",
        ),
        # Computed on the CPU, and moved afterwards for show.
        (
            "class Net(nn.Module):\n"
            "    def __init__(self):\n"
            "        super().__init__()\n"
            "        self.linear = nn.Linear(4, 3)\n"
            '        self.register_buffer("mean", torch.full((4,), 0.5))\n'
            "    def forward(self, images):\n"
            "        return self.linear(images - self.mean)\n"
            "def run(model, images, labels, device):\n"
            "    weights = torch.tensor([1.0, 2.0, 1.0])\n"
            "    loss = F.cross_entropy(model(images), labels, weight=weights)\n"
            "    model.to(device)\n"
            "    return loss.detach().numpy()\n",
            "on the requested device",
        ),
        # The weights are dropped, and the error with them.
        (
            "class Net(nn.Module):\n"
            "    def __init__(self):\n"
            "        super().__init__()\n"
            "        self.linear = nn.Linear(4, 3)\n"
            '        self.register_buffer("mean", torch.full((4,), 0.5))\n'
            "    def forward(self, images):\n"
            "        return self.linear(images - self.mean)\n"
            "def run(model, images, labels, device):\n"
            "    model.to(device)\n"
            "    loss = F.cross_entropy(model(images.to(device)), labels.to(device))\n"
            "    return loss.detach().cpu().numpy()\n",
            "centering by `mean` as in the script",
        ),
        # A Python number instead of NumPy's.
        (
            "class Net(nn.Module):\n"
            "    def __init__(self):\n"
            "        super().__init__()\n"
            "        self.linear = nn.Linear(4, 3)\n"
            '        self.register_buffer("mean", torch.full((4,), 0.5))\n'
            "    def forward(self, images):\n"
            "        return self.linear(images - self.mean)\n"
            "def run(model, images, labels, device):\n"
            "    model.to(device)\n"
            "    weights = torch.tensor([1.0, 2.0, 1.0], device=device)\n"
            "    logits = model(images.to(device))\n"
            "    return F.cross_entropy(logits, labels.to(device), weight=weights).item()\n",
            "as a NumPy number",
        ),
    ],
    "1.3": [
        # The numbers do not change.
        ("def physical(visible, ordinal, cards):\n    return ordinal\n", "counted from 0"),
        # Always the same.
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
