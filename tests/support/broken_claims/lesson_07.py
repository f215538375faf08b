"""Lesson 07: what keeps the replicas of DDP equal, and the readers of a file behind its writer."""

from broken_claims import Broken

BY_HAND = {"claim": "C07", "cell": "run-by-hand"}
REAL = {"claim": "C07", "cell": "run-the-real-one"}
REAL_RUN = "launch.run(on_a_rank, world_size, DDP)"

BROKEN = [
    Broken(
        **BY_HAND,
        how="gradients are summed in place of averaged",
        edits=[("parameter.grad /= dist.get_world_size()", "pass")],
    ),
    Broken(
        **BY_HAND,
        how="gradients stay on their ranks",
        edits=[("    dist.all_reduce(parameter.grad)", "    return")],
    ),
    Broken(
        **BY_HAND,
        how="each rank starts from its own weights",
        edits=[("dist.broadcast(tensor, src=0)", "pass")],
    ),
    Broken(
        **REAL,
        how="gradients stay on their ranks",
        edits=[(REAL_RUN, "launch.run(on_a_rank, world_size, lambda model: model)")],
    ),
    Broken(
        **REAL,
        how="each rank starts from its own weights",
        edits=[(REAL_RUN, REAL_RUN.replace("DDP", "lambda model: DDP(model, init_sync=False)"))],
    ),
    Broken(
        "C16",
        "no barrier before a late file is read",
        edits=[
            (
                "    if rank == 0:\n        torch.save(",
                "    if rank == 0:\n        late()\n        torch.save(",
            ),
            ("    dist.barrier()\n    bare", "    bare"),
            ("def save_once(", "def late():\n    __import__('time').sleep(1)\n\ndef save_once("),
        ],
        error="FileNotFoundError",
    ),
]
