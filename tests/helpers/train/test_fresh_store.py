"""Restarted ranks meet in a part of the store that no rank of an earlier round has touched."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from helpers.train.__main__ import fresh_store

LIMIT = timedelta(seconds=60)


@pytest.fixture
def agent_store(monkeypatch):
    """The store of an agent, and the environment that it gives to its ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    return store


def meet(ranks):
    """One round, each rank in a thread; each leaves its address, as gloo does."""

    def arrive(rank):
        store = fresh_store(rank, ranks, LIMIT)
        assert not store.check([f"address of {rank}"]), "somebody was here before"
        store.set(f"address of {rank}", f"{id(store)}")
        return [store.get(f"address of {other}") for other in range(ranks)]

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(arrive, range(ranks)))


def test_every_round_finds_its_own_ranks_only(agent_store):
    seen = []
    # A host leaves, and comes back.
    for ranks in (3, 3, 1, 2, 3):
        addresses = meet(ranks)
        assert all(found == addresses[0] for found in addresses)
        seen += addresses[0]


def test_a_rank_does_not_follow_the_announcement_of_a_dead_one(agent_store):
    meet(2)
    # Rank 1 of the new round is first, and sees all that the dead rank 0 has left.
    with ThreadPoolExecutor(2) as pool:
        late = pool.submit(fresh_store, 1, 2, LIMIT)
        while agent_store.get("hello/1") == b"":
            pass
        early = pool.submit(fresh_store, 0, 2, LIMIT)
        late.result().set("address of 1", "new")
        assert early.result().get("address of 1") == b"new"


def test_a_rank_that_never_comes(agent_store):
    with pytest.raises((TimeoutError, dist.DistStoreError)):
        fresh_store(0, 2, timedelta(seconds=1))
