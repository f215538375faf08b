"""Collectives and process groups on virtual GPUs match those on CPU tensors, on real ranks."""

import pytest
import torch
import torch.distributed as dist
from cells import cell
from levels import ALL

import vgpu
from vgpu import launch
from vgpu.launch import launcher

# Each body gets ``make(*size)``, which creates a tensor of the given dtype on the tested device,
# with values that depend on rank and seed; ``call``, keyword arguments for the group and async_op;
# ``done``, which waits; the group's size ``n``; its second rank ``root``; and this rank's ``peer``.
# It sets ``out``.
COLLECTIVES = {
    **{
        f"all_reduce {op}": f"out = [make(4)]; done(dist.all_reduce(out[0], dist.ReduceOp.{op}, **call))"
        for op in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
    },
    "broadcast": "out = [make(4)]; done(dist.broadcast(out[0], root, **call))",
    "reduce": (
        "x = make(4); done(dist.reduce(x, root, **call)); out = [x] if rank == root else []"
    ),
    "all_gather": (
        "out = [make(3) for _ in range(n)]; done(dist.all_gather(out, make(3), **call))"
    ),
    "all_gather_single": (
        "out = [make(3 * n)]; done(dist.all_gather_single(out[0], make(3), **call))"
    ),
    "reduce_scatter": (
        "out = [make(3)]; done(dist.reduce_scatter(out[0], [make(3) for _ in range(n)], **call))"
    ),
    "reduce_scatter_single": (
        "out = [make(3)]; done(dist.reduce_scatter_single(out[0], make(3 * n), **call))"
    ),
    "all_to_all": (
        "out = [make(2) for _ in range(n)]\n"
        "done(dist.all_to_all(out, [make(2) for _ in range(n)], **call))"
    ),
    "all_to_all_single": (
        "out = [make(2 * n)]; done(dist.all_to_all_single(out[0], make(2 * n), **call))"
    ),
    "all_to_all_single, uneven": (
        "sizes = [1 + (rank + r) % 2 for r in members]\n"
        "out = [make(sum(sizes))]\n"
        "done(dist.all_to_all_single(out[0], make(sum(sizes)), sizes, sizes, **call))"
    ),
    "gather": (
        "out = [make(3) for _ in range(n)] if rank == root else []\n"
        "done(dist.gather(make(3), out or None, dst=root, **call))"
    ),
    "scatter": (
        "out = [make(3)]\n"
        "parts = [make(3) for _ in range(n)] if rank == root else None\n"
        "done(dist.scatter(out[0], parts, src=root, **call))"
    ),
    "all_reduce_coalesced": (
        "out = [make(3), make(2, 2)]; done(dist.all_reduce_coalesced(out, **call))"
    ),
    "all_gather_coalesced": (
        "parts = [[make(3), make(2)] for _ in range(n)]\n"
        "done(dist.all_gather_coalesced(parts, [make(3), make(2)], **call))\n"
        "out = [tensor for part in parts for tensor in part]"
    ),
}
# These are only synchronous or only asynchronous.
AT_ONCE = {
    "send, recv": (
        "out = [make(3)]\n"
        "ways = [lambda: dist.send(make(3), peer, group), lambda: dist.recv(out[0], peer, group)]\n"
        "[way() for way in (ways if rank < peer else ways[::-1])]"
    ),
    "recv from any": (
        "out = [make(3)]\n"
        "work = dist.isend(make(3), peer, group)\n"
        "assert dist.recv(out[0], None, group) == peer; work.wait()"
    ),
    "isend, irecv": (
        "out = [make(3)]\n"
        "works = [dist.isend(make(3), peer, group), dist.irecv(out[0], peer, group)]\n"
        "[work.wait() for work in works]"
    ),
    "batch_isend_irecv": (
        "out = [make(3)]\n"
        "ops = [dist.P2POp(dist.isend, make(3), peer, group),"
        " dist.P2POp(dist.irecv, out[0], peer, group)]\n"
        "[work.wait() for work in dist.batch_isend_irecv(ops)]"
    ),
    **{
        f"functional {name}": f"out = functional.{name}({values}, group=around)\n"
        "out = [part + 0 for part in (out if isinstance(out, list) else [out])]"
        for name, values in {
            "all_reduce": "make(4), 'sum'",
            "all_gather_single": "make(3), 0",
            "reduce_scatter_single": "make(2 * n), 'sum', 0",
            "all_to_all_single": "make(2 * n), None, None",
            "broadcast": "make(3), 1",
            "all_reduce_coalesced": "[make(3), make(2)], 'sum'",
            "all_gather_into_tensor_coalesced": "[make(3), make(2)]",
            "reduce_scatter_tensor_coalesced": "[make(n), make(2 * n)], 'sum', [0, 0]",
        }.items()
    },
    "functional, into the caller's tensors": (
        "ops, name = torch.ops._c10d_functional, around.group_name\n"
        "out = [make(4), make(3), make(2), make(3 * n)]\n"
        "written = [ops.all_reduce_(out[0], 'sum', name)]\n"
        "written += ops.all_reduce_coalesced_(out[1:3], 'sum', name)\n"
        "written += [ops.all_gather_into_tensor_out(make(3), n, name, out=out[3])]\n"
        "assert all(ops.wait_tensor(x) is own for x, own in zip(written, out, strict=True))"
    ),
    "all_gather_object": (
        "found = [None] * n; dist.all_gather_object(found, make(2), group); out = found"
    ),
    "broadcast_object_list": (
        "found = [make(2), 'text']; dist.broadcast_object_list(found, root, group)\n"
        "assert found.pop() == 'text'; out = found"
    ),
    "gather_object": (
        "out = [None] * n if rank == root else []\n"
        "dist.gather_object(make(2), out or None, root, group)"
    ),
    "scatter_object_list": (
        "out = [None]; dist.scatter_object_list(out, [make(2) for _ in range(n)], root, group)"
    ),
    "barriers": ("dist.barrier(group); dist.monitored_barrier(group); out = [make(1)]"),
}
# Before torch 2.15, gloo has no all_to_all of lists; monitored_barrier needs a group named gloo.
LACKED = {"all_to_all", "barriers"}
DTYPES = (
    "float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64", "bool",
    "complex64",
)  # fmt: skip

# With all ranks or a pair, synchronous or asynchronous: every collective is tried with every dtype
# and in every way; with TESTS=all, in every combination of the two.
WAYS = [(False, False), (False, True), (True, True), (True, False)]


def cases(bodies, asynchronous):
    ways = [way for way in WAYS if asynchronous or not way[1]]
    return [
        (name, dtype, *way)
        for i, name in enumerate(bodies)
        for j, dtype in enumerate(DTYPES)
        for way in (ways if ALL else ways[(i + j) % 2 :: 2])
    ]


RANKS = """
def main(rank, world, bodies, cases):
    import torch.distributed._functional_collectives as functional
    warnings.simplefilter("ignore")  # the coalesced ones are deprecated
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    outcomes = []
    for name, dtype, grouped, later in cases:
        group = pairs[rank // 2] if grouped else None
        around = group or dist.group.WORLD
        members = dist.get_process_group_ranks(around)
        n, root, peer = len(members), members[1], rank ^ 1
        call = {"group": group, "async_op": later}
        results = []
        for device in (torch.device("cpu"), torch.device("vgpu", rank)):
            # torch.manual_seed would write down for each kind of GPU who called it: a millisecond.
            torch.default_generator.manual_seed(rank)

            def make(*size):
                values = torch.randint(-9, 9, size)
                return values.to(getattr(torch, dtype)).to(device)

            def done(work):
                assert (work is not None) == later
                if later:
                    work.wait()

            scope = dict(globals(), **locals())
            try:
                exec(bodies[name], scope)
            except (RuntimeError, TypeError, ValueError) as error:
                results.append(f"{type(error).__name__}: {error}".replace(str(device), "cpu"))
                continue
            out = scope["out"]
            if "object" not in name:
                assert all(t.device == device for t in out), (name, out)
            assert all(t.device.type == device.type for t in out), (name, out)
            results.append([t.tolist() for t in out])
        outcomes.append((name, dtype, grouped, later, *results))
    return outcomes
"""


@pytest.mark.parametrize(("bodies", "asynchronous"), [(COLLECTIVES, True), (AT_ONCE, False)])
def test_every_collective_has_the_same_result_as_on_the_cpu(bodies, asynchronous):
    main, tried = cell(RANKS)["main"], cases(bodies, asynchronous)
    ranks = launch.run(main, 4, bodies, tried, gpu="V100")
    for rank, outcomes in enumerate(ranks):
        assert [tuple(outcome[:4]) for outcome in outcomes] == tried
        for *case, on_cpu, on_gpu in outcomes:
            lacked_by_gloo = case[0] in LACKED and torch.__version__ < "2.15"
            assert on_gpu == on_cpu or (lacked_by_gloo and isinstance(on_cpu, str)), (rank, *case)
    # gloo rejects the same calls on both devices; most cases compare values.
    refused = {tuple(o[:2]) for o in ranks[0] if isinstance(o[-1], str)}
    assert len(refused) < len(bodies) * len(DTYPES) / 3, refused
    lacked = {name for name, dtype in refused if dtype == "float32" and "B" not in name}
    assert lacked <= (LACKED if torch.__version__ < "2.15" else set())


BEYOND_GLOO = """
import vgpu
def main(rank, world):
    gpu = torch.device("vgpu", rank)
    given = [torch.full((rank + to,), 10.0 * rank + to, device=gpu) for to in range(world)]
    received = [torch.empty(rank + source, device=gpu) for source in range(world)]
    with torch.autograd.profiler.profile(record_shapes=True) as profiler:
        dist.all_to_all(received, given)
        dist.barrier()
    events = {event.name: event.input_shapes for event in profiler.function_events}
    own, others = torch.zeros(2, device=gpu), torch.zeros(2, device=gpu)
    following, before = (rank + 1) % world, (rank - 1) % world
    with vgpu.record() as timeline:
        works = dist.batch_isend_irecv([
            dist.P2POp(dist.irecv, own, rank),
            dist.P2POp(dist.isend, own + rank + 1, rank),
            dist.P2POp(dist.isend, own + rank + 11, following),
            dist.P2POp(dist.irecv, others, before),
        ])
        for work in works:
            work.wait()
    assert timeline.makespan_s > 0
    (lone,) = dist.batch_isend_irecv([dist.P2POp(dist.isend, own, rank)])
    try:
        lone.wait()
    except RuntimeError as error:
        said = str(error)
    return [part.tolist() for part in received], own.tolist(), others.tolist(), events, said
"""


def test_vccl_supports_what_nccl_does_and_gloo_does_not():
    """Lists of unequal parts, messages from a rank to itself, and vccl's own profiler events."""
    for rank, (received, own, others, events, said) in enumerate(
        launch.run(cell(BEYOND_GLOO)["main"], 3, gpu="V100")
    ):
        assert received == [[10.0 * source + rank] * (rank + source) for source in range(3)]
        assert (own, others) == ([rank + 1.0] * 2, [(rank - 1) % 3 + 11.0] * 2)
        assert events["vccl:all_to_all"] == [[rank + to] for to in range(3)]
        assert "vccl:barrier" in events
        assert f"rank {rank} of the group is waiting for a send to or from itself" in said


BACKENDS = """
def main(rank, world, backends):
    # As init_process_group(device_id=...) sets it; on torch 2.11, a second gloo rendezvous may fail.
    dist.group.WORLD.bound_device_id = torch.device("vgpu", rank)
    sums = {}
    for backend in backends:
        group = dist.new_group(backend=backend)
        x, y = torch.ones(2, device="vgpu"), torch.ones(2)
        dist.all_reduce(x, group=group)
        dist.all_reduce(y, group=group)
        dist.barrier(group)
        sums[dist.get_backend(group)] = str(x.device), x.tolist(), y.tolist()
    return sums
"""


def test_every_group_of_virtual_gpus_accepts_cpu_and_gpu_tensors():
    backends = ["vccl", "vgpu:vccl", "cpu:gloo,vgpu:vccl", "vgpu:gloo"]
    for rank, sums in enumerate(launch.run(cell(BACKENDS)["main"], 2, backends, gpu="V100")):
        assert sums == dict.fromkeys(backends, (f"vgpu:{rank}", [2.0, 2.0], [2.0, 2.0]))


def test_the_error_for_a_hang_names_the_collective():
    source = """
    def main(rank, world):
        x = torch.ones(3, device="vgpu")
        if rank == 0:
            dist.all_reduce(x)
    """
    with pytest.raises(launch.RanksHung, match="rank 0 is waiting in all_reduce"):
        launch.run(cell(source)["main"], 2, gpu="V100")


def test_a_wait_beyond_its_timeout_raises_an_error_in_nccls_words():
    source = """
    import datetime
    def main(rank, world):
        if rank == 0:
            work = dist.all_reduce(torch.ones(3, device="vgpu"), async_op=True)
            try:
                work.wait(datetime.timedelta(milliseconds=50))
            except RuntimeError as error:
                return str(error)
    """
    message, _ = launch.run(cell(source)["main"], 2, gpu="V100")
    assert message.startswith("caught collective operation timeout: all_reduce has not finished")


@pytest.mark.parametrize(
    ("options", "phrase"),
    [
        ({"gpu": "Z9"}, "no GPU preset 'Z9'"),
        ({"memory_bytes": 5}, "also pass gpu"),
        ({"gpu": "V100", "memory_bytes": 0}, "must be a positive integer.*; got 0"),
    ],
)
def test_launch_rejects_invalid_gpu_options(options, phrase):
    with pytest.raises(ValueError, match=phrase):
        launch.run(lambda rank, world: None, 2, **options)


def test_launch_uses_real_gpus_if_there_are_enough(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.delenv("VGPU_DEVICES", raising=False)
    assert launcher._virtual_gpus(2, "V100", None) is None
    assert launcher._virtual_gpus(3, "V100", 7) == (vgpu.get_spec("V100"), 7)
    monkeypatch.setenv("VGPU_DEVICES", "vgpu")
    assert launcher._virtual_gpus(2, "V100", 7) == (vgpu.get_spec("V100"), 7)


def test_single_tensor_collectives_ignore_shapes_as_nccl_does():
    """Tensors are read as flat; SyncBatchNorm gathers into one of shape (1, n)."""
    main = cell(
        """
        def main(rank, world_size):
            gpu = torch.device("vgpu", rank)
            row = torch.full((2, 3), float(rank), device=gpu)
            gathered = torch.empty(1, 12, device=gpu)
            dist.all_gather_single(gathered, row)
            mine = torch.empty(3, 2, device=gpu)
            dist.reduce_scatter_single(mine, torch.arange(12.0, device=gpu).reshape(1, 12))
            return gathered.cpu(), mine.cpu()
        """
    )["main"]
    for rank, (gathered, mine) in enumerate(launch.run(main, 2, gpu="V100")):
        assert gathered.tolist() == [[0.0] * 6 + [1.0] * 6]
        expected = 2 * torch.arange(6.0 * rank, 6.0 * rank + 6).reshape(3, 2)
        torch.testing.assert_close(mine, expected, rtol=0, atol=0)


def test_autograd_warns_about_a_parameter_in_a_collective_as_on_the_cpu():
    main = cell(
        """
        def main(rank, world_size):
            warned = []
            for device in torch.device("cpu"), torch.device("vgpu", rank):
                parameter = torch.nn.Parameter(torch.ones(2, device=device))
                dist.broadcast(parameter, src=0)
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    parameter.sum().backward()
                warned.append(["autograd kernel was not" in str(w.message) for w in caught])
            return warned
        """
    )["main"]
    for on_cpu, on_gpu in launch.run(main, 2, gpu="V100"):
        assert on_gpu == on_cpu == [True]


# Futures, and the DDP communication hooks that use them

FUTURES = """
def main(rank, world):
    x = torch.full((3,), rank + 1.0, device="vgpu")
    y = torch.empty(world * 3, device="vgpu")
    parts = [torch.empty(3, device="vgpu") for _ in range(world)]
    cpu = torch.ones(3)
    held = torch.vgpu.memory_allocated()
    (reduced,) = dist.all_reduce(x, async_op=True).get_future().wait()
    gathered = dist.all_gather_single(y, x, async_op=True).get_future().wait()
    work = dist.all_gather(parts, x, async_op=True)
    listed = work.get_future().wait()
    work.wait()  # its future is done a moment before it is
    (plain,) = dist.all_reduce(cpu, async_op=True).get_future().wait()
    everything = torch.utils._pytree.tree_leaves((reduced, gathered, listed, work.result()))
    assert all(tensor.device == x.device for tensor in everything), everything
    assert torch.vgpu.memory_allocated() == held, "the same memory"
    reduced.add_(1)
    assert x.tolist() == [world * (world + 1) / 2 + 1] * 3
    assert type(plain) is torch.Tensor and plain.device.type == "cpu"
    twice = dist.all_reduce(x[:2], async_op=True).get_future().then(lambda f: f.value()[0] * 2)
    return str(twice.wait().device), twice.wait().tolist()
"""


def test_a_futures_tensors_are_on_the_gpu_of_its_collective():
    results = launch.run(cell(FUTURES)["main"], 2, gpu="V100")
    assert results == [(f"vgpu:{rank}", [16.0, 16.0]) for rank in range(2)]


EVERY_FUTURE = """
import vgpu

def main(rank, world, bodies):
    warnings.simplefilter("ignore")  # the coalesced ones are deprecated
    n, root, members, peer = world, 1, range(world), rank ^ 1
    call = {"async_op": True}
    make = lambda *size: torch.ones(size, device="vgpu")
    missing = []
    for name, body in bodies.items():
        works = []
        done = works.append
        scope = dict(globals(), **locals())
        exec(body, scope)
        found = []
        for work in works:
            future = work.get_future() if isinstance(work, dist.Work) else work
            found += torch.utils._pytree.tree_leaves(future.wait())
            assert not isinstance(work, dist.Work) or work.is_completed(), name
        if not all(any(part is one for one in found) for part in scope["out"]):
            missing.append(name)
    work = dist.reduce_scatter_single(make(3), make(3 * n), **call)
    while not work.is_completed():
        pass  # it says when it has ended, though gloo's does not
    with vgpu.record() as timeline:
        x = make(1000)
        dist.reduce_scatter_single(x[:500], x, async_op=True).get_future().wait()
        y = x + 1
        future = dist.reduce_scatter_single(y[:500], y, async_op=True).get_future()
        future.then(lambda done: done.value()[0] * 2).wait()
        sent = dist.isend(make(3), peer)
        assert dist.recv(make(3)) == peer
        sent.wait()
    return missing, timeline.races
"""


def test_every_collective_on_virtual_gpus_has_a_future():
    """gloo has none for some collectives, such as reduce_scatter, nor for messages."""
    sent = "works += [dist.isend(make(3), peer), dist.irecv(x := make(3), peer)]; out = [x]"
    own = "works += [dist.isend(make(3), rank), dist.irecv(x := make(3), rank)]; out = [x]"
    uneven = "out = [make(1), make(2)]; done(dist.all_gather(out, make(1 + rank), **call))"
    bodies = {name: body for name, body in COLLECTIVES.items() if "B" not in name}
    bodies |= {"messages": sent, "own messages": own, "uneven all_gather": uneven}
    for missing, races in launch.run(cell(EVERY_FUTURE)["main"], 2, bodies, gpu="V100"):
        assert missing == []
        assert races == []


HOOKS = """
def main(rank, world, names):
    from torch.distributed.algorithms.ddp_comm_hooks import (
        default_hooks, powerSGD_hook, quantization_hooks,
    )

    def own(state, bucket):
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0].div_(world).clone())

    hooks = {
        "own": (None, own),
        "allreduce": (None, default_hooks.allreduce_hook),
        "fp16": (None, default_hooks.fp16_compress_hook),
        "bf16": (None, default_hooks.bf16_compress_hook),
        "PowerSGD": (powerSGD_hook.PowerSGDState, powerSGD_hook.powerSGD_hook),
    }
    def values_of(kind, name):
        torch.manual_seed(rank)
        blocks = [torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16)]
        model = DDP(torch.nn.Sequential(*blocks).to(kind))
        state, hook = hooks[name]
        model.register_comm_hook(state and state(None, 2, start_powerSGD_iter=2), hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        values = []
        for step in range(5):
            torch.manual_seed(10 * step + rank)
            loss = model(torch.randn(4, 16).to(kind)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            values += [loss.item(), *(p.grad.cpu() for p in model.parameters())]
            optimizer.step()
        return values

    return {name: [values_of(kind, name) for kind in ("cpu", "vgpu")] for name in names}
"""


def test_communication_hooks_have_the_same_results_as_on_the_cpu():
    names = ["own", "allreduce", "fp16", "PowerSGD"]
    if torch.version.cuda is not None:  # other builds of torch lack this one, whatever the device
        names.append("bf16")
    for results in launch.run(cell(HOOKS)["main"], 2, names, gpu="V100"):
        assert list(results) == names
        for on_cpu, on_gpu in results.values():
            assert len(on_gpu) == 25
            for one, other in zip(on_gpu, on_cpu, strict=True):
                assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
