"""Replayed recordings: identical bit for bit, on other GPUs, and with multiple ranks together.

In the toy model, a launch takes 1 µs, a GPU reads and writes 1 GB/s and sends 1 GB/s, and
everything else is free.
"""

import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from toy_gpu import COSTS, KB, SPEC

import vgpu
from vgpu import launch

US = 1e-6

pytestmark = pytest.mark.virtual_gpus(2, gpu=SPEC)


def near(microseconds):
    return pytest.approx(microseconds * US, rel=1e-9, abs=1e-15)


# One rank alone


def with_streams():
    x = torch.randn(30, 30, device="vgpu:0")
    side, event = torch.vgpu.Stream("vgpu:0"), torch.vgpu.Event()
    with torch.vgpu.stream(side):
        product = x @ x
        event.record()
    while not event.query():
        x.neg()
    torch.vgpu.current_stream("vgpu:0").wait_event(event)
    (product + x).to("vgpu:1").sum().item()
    product + 1
    torch.vgpu.synchronize("vgpu:0")
    product.cpu()


def with_data_parallel():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).to("vgpu:0")
    parallel = nn.DataParallel(model, [0, 1])
    parallel(torch.randn(8, 64, device="vgpu:0")).sum().backward()


def with_a_race():
    x = torch.randn(30, 30, device="vgpu:0")
    with torch.vgpu.stream(torch.vgpu.Stream("vgpu:0")):
        product = x @ x
    product + 1


PROGRAMS = {
    program.__name__: program for program in (with_streams, with_data_parallel, with_a_race)
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_replay_without_changes_is_identical_bit_for_bit(name):
    with vgpu.record() as timeline:
        PROGRAMS[name]()
    assert timeline.events
    assert timeline.races or name != "with_a_race"
    assert vgpu.replay(timeline) == timeline
    assert pickle.loads(pickle.dumps(timeline)) == timeline


@pytest.mark.parametrize(
    "changes",
    [
        {"memory_share": 0.1},
        {"link": "PCIe 3"},
        {"gpu": "H100"},
        {"gpu": "A100", "link": "PCIe 4", "arithmetic_share": 0.3},
        {"python_launch_s": 1e-4, "engine_launch_s": 3e-5, "kernel_s": 1e-5},
    ],
)
def test_a_replay_with_changes_equals_a_recording_with_them(changes):
    with vgpu.record() as timeline:
        with_data_parallel()
    again = vgpu.replay(timeline, **changes)
    assert again.makespan_s != timeline.makespan_s
    others = {name: value for name, value in changes.items() if name != "gpu"}
    with vgpu.enable(2, gpu=changes.get("gpu", SPEC)), vgpu.record(**others) as wanted:
        with_data_parallel()
    assert (again.gpu, again.makespan_s, again.host_s) == (
        wanted.gpu,
        wanted.makespan_s,
        wanted.host_s,
    )
    assert again.events == wanted.events


def test_fsdp_can_be_replayed_on_another_network():
    def step(built_with):
        with vgpu.cluster(2, 4, gpu="A100", network=built_with), vgpu.shapes_only():
            model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).to("vgpu")
            for layer in model:
                fully_shard(layer)
            fully_shard(model)
            with vgpu.record() as timeline:
                model(torch.empty(64, 256, device="vgpu")).sum().backward()
        return timeline

    fast, slow = step("InfiniBand NDR"), step("Ethernet 25")
    assert vgpu.replay(fast) == fast
    again = vgpu.replay(fast, network="Ethernet 25")
    assert again.makespan_s == slow.makespan_s > 2 * fast.makespan_s
    assert [e.end_s for e in again.events] == [e.end_s for e in slow.events]


def test_replay_rejects_a_timeline_without_steps_and_an_unknown_gpu():
    with pytest.raises(
        ValueError, match=r"no recorded steps to replay: use a timeline from record\(\)"
    ):
        vgpu.replay(vgpu.Timeline("made by hand", []))
    with vgpu.record() as timeline:
        torch.ones(1, device="vgpu:0")
    with pytest.raises(ValueError, match="no GPU preset 'H9000'"):
        vgpu.replay(timeline, gpu="H9000")


# Real ranks


def unequal(rank, world_size, costs):
    x = torch.ones(KB, device=torch.device("vgpu", rank))
    with vgpu.record(costs) as timeline:
        for _ in range(2 * rank + 1):
            y = x.neg()
        work = dist.all_reduce(y, async_op=True)
        future = work.get_future()
        assert work.wait() and work.is_completed() and work.exception() is None
        y.neg().sum().item()
    assert future.value()[0].tolist() == y.tolist()
    return timeline, y.tolist()


def test_real_ranks_wait_for_the_slowest():
    found = launch.run(unequal, 2, COSTS, gpu=SPEC)
    assert [values for _, values in found] == [[-2.0] * KB] * 2
    timelines = [timeline for timeline, _ in found]
    alone = [event for event in timelines[0].events if event.kind == "collective"]
    assert (alone[0].start_s, alone[0].end_s) == (near(3), near(4))
    timeline = vgpu.joined(timelines)
    assert timeline.ranks == [0, 1] and [str(d) for d in timeline.devices] == ["vgpu:0", "vgpu:1"]
    parts = [event for event in timeline.events if event.kind == "collective"]
    # Rank 1's third operation ends after 1 + 3 × 2 µs. Half of 1 kB goes around twice.
    assert [(e.start_s, e.end_s) for e in parts] == [(near(7), near(8))] * 2
    assert [event.ready_s for event in parts] == [near(3), near(7)]
    assert [event.waited_s for event in parts] == [near(4), near(0)]
    after = [e for e in timeline.of("vgpu:0") if e.start_s > parts[0].start_s]
    assert [e.name for e in after] == ["neg", "sum", "_local_scalar_dense"]
    assert (after[0].start_s, after[0].end_s) == (near(8), near(10))
    waits = [event for event in timeline.events if event.kind == "wait"]
    assert [event.stream for event in waits] == [0, 1]  # the hosts of both ranks
    assert waits[0].end_s == near(10 + 1.004 + 0.004)
    assert vgpu.replay(timeline) == timeline
    slower = vgpu.replay(timeline, link=vgpu.Link("half", 0.5e9, 0.0, "made for these tests"))
    assert slower.makespan_s - timeline.makespan_s == near(1)


# Ranks of a cluster, recorded one after the other


def of_rank(rank, program, hosts=1, gpus_per_host=2):
    with vgpu.cluster(hosts, gpus_per_host, gpu=SPEC, rank=rank), vgpu.shapes_only():
        x = torch.empty(KB, device="vgpu")
        with vgpu.record(COSTS) as timeline:
            program(rank, x)
    return timeline


def joined(*programs, **of):
    return vgpu.joined([of_rank(rank, program, **of) for rank, program in enumerate(programs)])


def test_a_message_waits_for_its_receiver():
    def sends(rank, x):
        x.neg()
        x.neg()
        dist.send(x, 1)

    def receives(rank, x):
        dist.recv(x, 0)
        x.neg()

    timeline = joined(sends, receives)
    sent, received = (e for e in timeline.events if e.kind == "collective")
    assert (sent.name, received.name) == ("send", "recv")
    assert (sent.start_s, sent.end_s) == (received.start_s, received.end_s) == (near(5), near(6))
    assert received.waited_s == near(4)
    assert timeline.of("vgpu:1")[-1].start_s == near(6)


def test_hosts_wait_for_each_other_at_a_barrier():
    def meets(rank, x):
        for _ in range(2 * rank):
            x.neg()
        dist.barrier(device_ids=[rank])
        x.neg()

    timeline = joined(meets, meets)
    last = [timeline.of(device)[-1] for device in timeline.devices]
    # Rank 1's second operation ends at 5 µs; one byte goes around twice, half of it each time.
    assert [event.launch_s for event in last] == [near(6.001)] * 2


def test_both_directions_of_a_link_work_at_once():
    def both(rank, x):
        y = x.neg()
        ops = dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, y, 1 - rank)
        for work in dist.batch_isend_irecv(list(ops)):
            work.wait()

    timeline = joined(both, both)
    parts = [event for event in timeline.events if event.kind == "collective"]
    assert len(parts) == 4
    assert [(event.start_s, event.end_s) for event in parts] == [(near(3), near(4))] * 4


def test_an_all_to_all_takes_as_long_as_the_rank_with_the_most_bytes():
    def exchanges(rank, x):
        mine = 2 * KB * rank + KB  # elements for this rank itself; the other rank gets KB
        given, splits = x.new_empty(mine + KB), [KB, KB]
        splits[rank] = mine
        dist.all_to_all_single(torch.empty_like(given), given, splits, splits)

    timeline = joined(exchanges, exchanges)
    parts = [event for event in timeline.events if event.kind == "collective"]
    assert [event.size_bytes for event in parts] == [2000, 4000]
    # Half of rank 1's 4 kB goes to each rank.
    assert [(event.start_s, event.end_s) for event in parts] == [(near(1), near(3))] * 2


def test_a_host_keeps_launching_while_a_stream_waits():
    """Both ranks receive before they send; rank 0 sends on a side stream, which doesn't wait."""

    def first(rank, x):
        side = torch.vgpu.Stream()
        y = torch.empty_like(x)
        dist.irecv(y, 1).wait()
        y.neg()
        with torch.vgpu.stream(side):
            dist.isend(x, 1)

    def second(rank, x):
        y = torch.empty_like(x)
        dist.irecv(y, 0).wait()
        dist.isend(y, 0)

    timeline = joined(first, second)
    ends = [e.end_s for e in timeline.of("vgpu:0") if e.kind == "collective"]
    assert ends == [near(4), near(5)]  # launched third, then sent back


def test_copies_of_joined_ranks_name_their_gpu():
    timeline = joined(lambda rank, x: x.cpu(), lambda rank, x: x.cpu())
    copies = [event for event in timeline.events if event.kind == "copy"]
    assert [str(event.source) for event in copies] == ["vgpu:0", "vgpu:1"]


def test_the_error_for_a_deadlock_says_who_waits_for_whom():
    def waits(rank, x):
        dist.recv(x, 1 - rank)
        dist.send(x, 1 - rank)

    with pytest.raises(vgpu.Deadlock) as caught:
        joined(waits, waits)
    assert "rank 0 is waiting in recv of 1,000 bytes from rank 1" in str(caught.value)
    assert "rank 1 is waiting in recv of 1,000 bytes from rank 0" in str(caught.value)
    with pytest.raises(vgpu.Deadlock) as caught:
        joined(lambda rank, x: dist.all_reduce(x), lambda rank, x: x.neg())
    assert "rank 0 is waiting in all_reduce of 1,000 bytes among ranks [0, 1]" in str(caught.value)
    assert "rank 1 has finished" in str(caught.value)


def test_joined_rejects_ranks_with_different_calls():
    with pytest.raises(
        ValueError, match=r"ranks 0 and 1 make different calls .* all_reduce of 1,000 bytes and br"
    ):
        joined(lambda rank, x: dist.all_reduce(x), lambda rank, x: dist.broadcast(x, 0))
    with pytest.raises(ValueError, match=r"1,000 bytes and all_reduce of 400 bytes"):
        joined(lambda rank, x: dist.all_reduce(x), lambda rank, x: dist.all_reduce(x[:100]))


def test_joined_rejects_recordings_that_do_not_match():
    one = of_rank(0, lambda rank, x: dist.send(x, 1), gpus_per_host=3)
    with pytest.raises(ValueError, match="there are multiple recordings of rank 0"):
        vgpu.joined([one, one])
    other = of_rank(2, lambda rank, x: x.neg(), gpus_per_host=3)
    with pytest.raises(ValueError, match="rank 0 calls send with rank 1, which has no recording"):
        vgpu.joined([one, other])
    with pytest.raises(ValueError, match="no recordings to join"):
        vgpu.joined([])
    with vgpu.enable(2, gpu=SPEC), vgpu.record() as both:
        torch.ones(1, device="vgpu:0"), torch.ones(1, device="vgpu:1")
    with pytest.raises(ValueError, match="rank 0 used 2 GPUs in its recording"):
        vgpu.joined([both])


def test_ranks_that_do_the_same_work_take_as_long_as_one_alone():
    def step(rank, x):
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).to("vgpu")
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        model(torch.empty(64, 256, device="vgpu")).sum().backward()

    ranks = [of_rank(rank, step, hosts=2) for rank in range(4)]
    timeline = vgpu.joined(ranks)
    for rank, alone in enumerate(ranks):
        own = [(e.name, e.start_s, e.end_s) for e in alone.events if e.kind != "wait"]
        assert [(e.name, e.start_s, e.end_s) for e in timeline.of(f"vgpu:{rank}")] == own
