"""Lesson 01: what a gradient keeps, what ``.cuda()`` asks for, when the variable is read."""

from broken_claims import Broken

BROKEN = [
    Broken(
        "A03",
        "a bare type spreads over both GPUs",
        edits=[
            (
                "grown_mib = [size / 2**20 for size in growth(lambda: torch.ones(2**21, device=kind))]",
                "grown_mib = [4, 4]",
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
        edits=[("y = x.to(gpus[1])\nx += 10", "y = x\nx += 10")],
    ),
    Broken(
        "A09",
        "one of the two calls copies twice",
        edits=[("lambda: getattr(image, kind)(0),", "lambda: getattr(image.clone(), kind)(0),")],
        cell="to-or-cuda",
    ),
    Broken(
        "A15",
        "CUDA never starts",
        edits=[("for started in (False, True):", "for started in (False, False):")],
    ),
    Broken(
        "A15",
        "CUDA has started from the first",
        edits=[("for started in (False, True):", "for started in (True, True):")],
    ),
]
