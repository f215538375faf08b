"""Lesson 06: collectives that everyone calls, a ring that sends chunks, a barrier that waits."""

from broken_claims import Broken

BROKEN = [
    Broken(
        "C01",
        "the source's tensor is not sent",
        expensive=True,
        cell="one-to-all-figure",
        old="    dist.broadcast(tensor, src=0)\n",
        new="",
    ),
    Broken(
        "C01",
        "nobody waits at the barrier",
        expensive=True,
        cell="barrier-run",
        old="    dist.barrier()\n    return came_s",
        new="    return came_s",
    ),
    Broken(
        "C02",
        "the ring sends whole tensors",
        expensive=True,
        old="yield outgoing.nbytes",
        new="yield tensor.nbytes",
        shorter=[("for n in (2, 3, 4, 5, 6)}", "for n in (2, 6)}")],
    ),
    Broken(
        "C03",
        "each rank is alone in its own process group",
        expensive=True,
        cell="by-hand-run",
        old="init_method=meeting_point, rank=rank, world_size=world_size",
        new='init_method=f"{meeting_point}-{rank}", rank=0, world_size=1',
    ),
    Broken(
        "C04",
        "the rank without losses takes part, and adds nothing",
        expensive=True,
        cell="hang-asserted",
        old="        return None  # nothing to add here",
        new="        mine = torch.zeros(1)",
    ),
]
