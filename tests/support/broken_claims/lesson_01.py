"""Lesson 01: where a tensor is, what moves it, what an error compares, when the variable is read."""

from broken_claims import Broken

BROKEN = [
    Broken(
        "A01",
        "device= is ignored",
        edits=[("on_gpu = torch.zeros(2, device=gpus[1])", "on_gpu = torch.zeros(2)")],
    ),
    Broken(
        "A02",
        "a bare type is the first GPU, whichever is current",
        edits=[("with api.device(1):  # torch", "with api.device(0):  # torch")],
    ),
    Broken(
        "A03",
        "a bare type spreads over both GPUs",
        edits=[
            (
                "growth_mib(lambda: torch.ones(2**21, device=kind))\nguess",
                "growth_mib(lambda: [torch.ones(2**20, device=gpu) for gpu in gpus])\nguess",
            )
        ],
    ),
    Broken(
        "A05",
        "the tensor is made in main memory and copied",
        edits=[
            (
                "made_there:\n    torch.zeros(3, device=gpus[1])",
                "made_there:\n    torch.zeros(3).to(gpus[1])",
            )
        ],
    ),
    Broken(
        "A06",
        "an addition keeps its input",
        edits=[("both_mib(lambda x: x + 1)", "both_mib(lambda x: x * x)")],
    ),
    Broken("A06", "a sine keeps nothing", edits=[("both_mib(torch.sin)", "both_mib(torch.neg)")]),
    Broken(
        "A07",
        "to() returns the tensor itself",
        edits=[("y = x.to(gpus[1])\nwith", "y = x\nwith")],
    ),
    Broken(
        "A07",
        "to() copies to the same device too",
        edits=[("again = y.to(gpus[1])", "again = y.to(gpus[1], copy=True)")],
    ),
    Broken(
        "A08",
        "cuda() makes a second module",
        edits=[
            (
                "by_cuda = getattr(other, kind)(1)",
                "by_cuda = getattr(nn.Linear(4, 2), kind)(1)",
            )
        ],
    ),
    Broken(
        "A09",
        "one of the two calls copies twice",
        edits=[("lambda: getattr(image, kind)(0),", "lambda: getattr(image.clone(), kind)(0),")],
        cell="to-or-cuda",
    ),
    Broken(
        "A10",
        "the space is skipped",
        edits=[('torch.device(f"{kind}: 0")', 'torch.device(f"{kind}: 0".replace(" ", ""))')],
    ),
    Broken(
        "A11",
        "every ordinal exists",
        edits=[("missing = torch.device(kind, 99)", "missing = torch.device(kind, 99 % 2)")],
    ),
    Broken(
        "A12",
        "the second operand is moved behind one's back",
        edits=[("*map(str, gpus)):\n    a + b", "*map(str, gpus)):\n    a + b.to(a.device)")],
        cell="two-gpus",
    ),
    Broken(
        "A12",
        "a single number may cross whatever its dimensions",
        edits=[("    a * torch.ones(1)", "    a * torch.ones(1).squeeze()")],
        cell="scalar",
    ),
    Broken(
        "A13",
        "the machine has two cards",
        expensive=True,
        edits=[
            ('_raw_device_count_nvml", lambda: 4):\n', '_raw_device_count_nvml", lambda: 2):\n')
        ],
    ),
    Broken(
        "A15",
        "CUDA never starts",
        expensive=True,
        edits=[("for started in (False, True):", "for started in (False, False):")],
    ),
    Broken(
        "A15",
        "CUDA has started from the first",
        expensive=True,
        edits=[("for started in (False, True):", "for started in (True, True):")],
    ),
    Broken(
        "A16",
        "the block leaves its device current",
        edits=[
            (
                "    with api.device(1):\n        raise",
                "    api.set_device(1)\n    if True:\n        raise",
            )
        ],
    ),
    Broken(
        "A17",
        "the line of today does not find the GPU",
        before="patch('torch.accelerator.current_accelerator', lambda **_: None)",
    ),
    Broken(
        "A18",
        "a shuffling loader draws on the default device",
        edits=[
            (
                "        list(DataLoader(range(4), batch_size=None, shuffle=True))",
                "        list(DataLoader(range(4), batch_size=None, shuffle=True, generator=torch.Generator(gpus[0])))",
            )
        ],
        cell="loader-trap",
    ),
]
