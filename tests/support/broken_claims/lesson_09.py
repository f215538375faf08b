"""Lesson 09: what makes a pipeline, what bends its curve, and what streams must wait for."""

from broken_claims import Broken

BROKEN = [
    Broken(
        "D09",
        "the loop waits for each piece",
        edits=[
            (
                "            outputs.append(hidden)\n        return",
                "            outputs.append(hidden)\n            torch.accelerator.synchronize(hidden.device)\n        return",
            )
        ],
    ),
    Broken(
        "D10",
        "a copy waits for nobody",
        cell="copy-in-both",
        edits=[
            (
                "            x.to(lab.devices[1])\n",
                "            with torch.Stream(lab.devices[0]), torch.Stream(lab.devices[1]):\n                x.to(lab.devices[1])\n",
            )
        ],
    ),
    Broken(
        "D10",
        "the copy's user needs no wait, since Python waits",
        cell="race",
        edits=[
            (
                "            used = moved + 0",
                "            torch.accelerator.synchronize(there)\n            used = moved + 0",
            )
        ],
    ),
    Broken(
        "A33",
        "the batches are fetched on the default stream",
        edits=[
            (
                "default, side = current(weight.device), torch.Stream(weight.device)",
                "default = side = current(weight.device)",
            )
        ],
    ),
    Broken(
        "A33",
        "nothing is pinned",
        edits=[
            (
                "batches = [batch.pin_memory() for batch in batches] if pinned else batches",
                "batches = list(batches)",
            )
        ],
    ),
]
