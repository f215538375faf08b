"""A fresh store for the ranks that torchrun has started, or started again.

A process group is made through a store, in which every rank looks up the others' addresses. Since
PyTorch 2.5 torchrun's agent keeps one such store for the whole job, restarts included. A restarted
rank can then find the address of a peer that is dead, and both wait for half an hour
(https://github.com/pytorch/pytorch/issues/135712 has the story). Counting restarts does not help:
a host that has just come back counts from zero.
"""

import json
import time
import uuid
from datetime import timedelta

import torch.distributed as dist


def fresh_store(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The store of MASTER_ADDR and MASTER_PORT, seen through a prefix of this round alone.

    Every rank says hello with a fresh token. Rank 0 announces the prefix together
    with the tokens that it has heard, again and again until all have answered: an announcement
    with one's own token cannot be an old one. Raises TimeoutError if a rank does not come.
    """
    store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=timeout))
    token = uuid.uuid4().hex
    until_s = time.monotonic() + timeout.total_seconds()
    store.set(f"hello/{rank}", token)
    while time.monotonic() < until_s:
        if rank == 0:
            tokens = [store.get(f"hello/{other}").decode() for other in range(world_size)]
            store.set("announced", json.dumps(tokens))
        else:
            tokens = json.loads(store.get("announced"))
        if token in tokens:
            # The token of rank 0 names the round.
            prefix = tokens[0]
            store.set(f"{prefix}/{rank}", token)
            if rank != 0 or _all_there(store, prefix, tokens):
                return dist.PrefixStore(prefix, store)
        time.sleep(0.01)
    raise TimeoutError(f"rank {rank} of {world_size}: not all ranks came within {timeout}")


def _all_there(store: dist.Store, prefix: str, tokens: list[str]) -> bool:
    keys = [f"{prefix}/{rank}" for rank in range(len(tokens))]
    return store.check(keys) and [store.get(key).decode() for key in keys] == tokens
