"""Lesson 16: what makes a collective long, a page of all ranks consistent, and a GPU busy."""

from broken_claims import Broken

BROKEN = [
    Broken(
        "L01",
        "nobody comes late",
        edits=[("time.sleep(0.1 if rank == 1 else 0)", "time.sleep(0.1 if rank == 0 else 0)")],
    ),
    Broken(
        "L02",
        "ranks keep the numbers of their arrows",
        edits=[('row["id"] = row["id"] * len(traces) + rank', "pass")],
    ),
    Broken(
        "L03",
        "both ranks have as many rows",
        edits=[("ddp_steps(1, 8192)", "ddp_steps(1, 4096)")],
    ),
    Broken(
        "L04",
        "the validation set is small",
        edits=[("torch.randn(40, 2**18, device=gpu)", "torch.randn(4, 2**18, device=gpu)")],
    ),
    Broken(
        "L05",
        "rank 1 has no second batch",
        expensive=True,
        edits=[("if rank != 2:  # rank 2 has", "if rank != 1:  # rank 1 has")],
    ),
]
