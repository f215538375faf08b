"""Lesson 16: what makes a collective long, a trace of all ranks consistent, and a GPU busy."""

from broken_claims import Broken

BROKEN = [
    Broken(
        "L01",
        "no rank is late",
        expensive=True,
        old="time.sleep(0.1 if rank == 1 else 0)",
        new="time.sleep(0.1 if rank == 0 else 0)",
    ),
    Broken(
        "L02",
        "ranks keep their own arrow ids",
        expensive=True,
        old='event["id"] = event["id"] * len(traces) + rank',
        new="pass",
    ),
    Broken(
        "L03",
        "both ranks have the same number of rows",
        old="ddp_steps(1, 8192)",
        new="ddp_steps(1, 4096)",
    ),
    Broken(
        "L04",
        "the validation set is small",
        old="torch.randn(40, 2**18, device=gpu)",
        new="torch.randn(4, 2**18, device=gpu)",
    ),
    Broken(
        "L05",
        "rank 1 has no second batch",
        expensive=True,
        old="if rank != 2:  # rank 2 has",
        new="if rank != 1:  # rank 1 has",
    ),
]
