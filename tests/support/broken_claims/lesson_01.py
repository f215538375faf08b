"""Lesson 01: where a tensor is, what moves it, what an error compares, when the variable is read."""

from broken_claims import Broken

BROKEN = [
    Broken(
        "A01",
        "device= is ignored",
        old="on_gpu = torch.zeros(2, device=gpus[1])",
        new="on_gpu = torch.zeros(2)",
    ),
    Broken(
        "A02",
        "a device without an index is the first GPU, not the current one",
        old="with api.device(1):  # torch",
        new="with api.device(0):  # torch",
    ),
    Broken(
        "A03",
        "a device without an index uses both GPUs",
        old="growth_mib(lambda: torch.ones(2**21, device=kind))\nguess",
        new="growth_mib(lambda: [torch.ones(2**20, device=gpu) for gpu in gpus])\nguess",
    ),
    Broken(
        "A05",
        "the tensor is created in main memory and copied",
        old="made_there:\n    torch.zeros(3, device=gpus[1])",
        new="made_there:\n    torch.zeros(3).to(gpus[1])",
    ),
    Broken(
        "A06",
        "an addition saves its input",
        old="both_mib(lambda x: x + 1)",
        new="both_mib(lambda x: x * x)",
    ),
    Broken("A06", "a sine saves nothing", old="both_mib(torch.sin)", new="both_mib(torch.neg)"),
    Broken(
        "A07", "to() returns the tensor itself", old="y = x.to(gpus[1])\nwith", new="y = x\nwith"
    ),
    Broken(
        "A07",
        "to() also copies to the same device",
        old="again = y.to(gpus[1])",
        new="again = y.to(gpus[1], copy=True)",
    ),
    Broken(
        "A08",
        "cuda() creates a second module",
        old="by_cuda = getattr(other, kind)(1)",
        new="by_cuda = getattr(nn.Linear(4, 2), kind)(1)",
    ),
    Broken(
        "A09",
        "one of the two calls copies twice",
        old="lambda: getattr(image, kind)(0),",
        new="lambda: getattr(image.clone(), kind)(0),",
        cell="to-or-cuda",
    ),
    Broken(
        "A10",
        "the space is skipped",
        old='torch.device(f"{kind}: 0")',
        new='torch.device(f"{kind}: 0".replace(" ", ""))',
    ),
    Broken(
        "A11",
        "every ordinal exists",
        old="missing = torch.device(kind, 99)",
        new="missing = torch.device(kind, 99 % 2)",
    ),
    Broken(
        "A12",
        "the second operand is moved silently",
        old="*map(str, gpus)):\n    a + b",
        new="*map(str, gpus)):\n    a + b.to(a.device)",
        cell="two-gpus",
    ),
    Broken(
        "A12",
        "a one-element tensor may be on another device, whatever its dimensions",
        old="    a * torch.ones(1)",
        new="    a * torch.ones(1).squeeze()",
        cell="scalar",
    ),
    Broken(
        "A13",
        "the machine has two cards",
        expensive=True,
        old='_raw_device_count_nvml", lambda: 4):\n',
        new='_raw_device_count_nvml", lambda: 2):\n',
    ),
    Broken(
        "A15",
        "CUDA is never initialized",
        expensive=True,
        old="for initialized in (False, True):",
        new="for initialized in (False, False):",
    ),
    Broken(
        "A15",
        "CUDA is initialized from the start",
        expensive=True,
        old="for initialized in (False, True):",
        new="for initialized in (True, True):",
    ),
    Broken(
        "A16",
        "the device stays current after the block",
        old="    with api.device(1):\n        raise",
        new="    api.set_device(1)\n    if True:\n        raise",
    ),
    Broken(
        "A17",
        "today's line does not find the GPU",
        before="patch('torch.accelerator.current_accelerator', lambda **_: None)",
    ),
    Broken(
        "A18",
        "a shuffling loader draws on the default device",
        old="        list(DataLoader(range(4), batch_size=None, shuffle=True))",
        new="        list(DataLoader(range(4), batch_size=None, shuffle=True, generator=torch.Generator(gpus[0])))",
        cell="loader-trap",
    ),
]
