"""Lesson 03: one GPU unless told otherwise, and what a checkpoint remembers and refuses."""

from broken_claims import Broken

# The break shows without long training.
SHORT = [("EPOCHS = 10\n", "EPOCHS = 1\n")]

BROKEN = [
    Broken(
        "A32",
        "a model without an ordinal goes to the second GPU",
        edits=[("DigitsCNN().to(device.type)", "DigitsCNN().to(gpus[1])")],
        shorter=SHORT,
    ),
    Broken(
        "A34",
        "the file comes from the first GPU",
        edits=[("model.to(gpus[1]).state_dict()", "model.to(gpus[0]).state_dict()")],
        shorter=SHORT,
        cell="location-tags",
    ),
    Broken(
        "A34",
        "the file comes from a GPU that the other machine has",
        expensive=True,
        edits=[("model.to(gpus[1]).state_dict()", "model.to(gpus[0]).state_dict()")],
        shorter=SHORT,
        cell="other-run",
    ),
    Broken(
        "A34",
        "nothing is refused",
        edits=[('"gift.pt", weights_only=weights_only)', '"gift.pt", weights_only=False)')],
        shorter=SHORT,
        cell="refused-asserted",
        needs=("surprise",),
    ),
]
