"""Lesson 03: one GPU unless told otherwise, and what a checkpoint remembers and refuses."""

from broken_claims import Broken

# The break shows without long training.
SHORT = [("EPOCHS = 10\n", "EPOCHS = 1\n")]

BROKEN = [
    Broken(
        "A32",
        "a model without an ordinal goes to the second GPU",
        expensive=True,
        old="DigitsCNN().to(device.type)",
        new="DigitsCNN().to(gpus[1])",
        shorter=SHORT,
    ),
    Broken(
        "A34",
        "the file comes from the first GPU",
        expensive=True,
        old="model.to(gpus[1]).state_dict()",
        new="model.to(gpus[0]).state_dict()",
        shorter=SHORT,
        cell="location-tags",
    ),
    Broken(
        "A34",
        "the file comes from a GPU that the other machine has",
        expensive=True,
        old="model.to(gpus[1]).state_dict()",
        new="model.to(gpus[0]).state_dict()",
        shorter=SHORT,
        cell="other-run",
    ),
    Broken(
        "A34",
        "nothing is refused",
        expensive=True,
        old='"gift.pt", weights_only=weights_only)',
        new='"gift.pt", weights_only=False)',
        shorter=SHORT,
        cell="refused-asserted",
        needs=("surprise",),
    ),
]
