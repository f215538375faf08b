"""Collectives on virtual GPUs, each beside the same one on CPU tensors, over real ranks."""

import pytest
import torch
import torch.distributed as dist
from cells import cell

from helpers import launch, vgpu
from helpers.launch import launcher

# Each body gets ``make(*size)``, which fills a tensor of the given type on the device under trial
# from rank and seed, and ``call``: keywords for the group and for async_op. It gives back tensors.
COLLECTIVES = {
    "all_reduce": "x = make(4); work = dist.all_reduce(x, **call); done(work); out = [x]",
    "all_reduce max": (
        "x = make(4); work = dist.all_reduce(x, dist.ReduceOp.MAX, **call); done(work); out = [x]"
    ),
    "broadcast": "x = make(4); work = dist.broadcast(x, 1, **call); done(work); out = [x]",
    "reduce": (
        "x = make(4); work = dist.reduce(x, 1, **call); done(work); out = [x] if rank == 1 else []"
    ),
    "all_gather": (
        "out = [make(3) for _ in range(n)]; done(dist.all_gather(out, make(3), **call))"
    ),
    "all_gather_into_tensor": (
        "out = [make(3 * n)]; done(dist.all_gather_into_tensor(out[0], make(3), **call))"
    ),
    "reduce_scatter": (
        "out = [make(3)]; done(dist.reduce_scatter(out[0], [make(3) for _ in range(n)], **call))"
    ),
    "reduce_scatter_tensor": (
        "out = [make(3)]; done(dist.reduce_scatter_tensor(out[0], make(3 * n), **call))"
    ),
    "all_to_all_single": (
        "out = [make(2 * n)]; done(dist.all_to_all_single(out[0], make(2 * n), **call))"
    ),
    "gather": (
        "out = [make(3) for _ in range(n)] if rank == 1 else []\n"
        "done(dist.gather(make(3), out or None, dst=1, **call))"
    ),
    "scatter": (
        "out = [make(3)]\n"
        "parts = [make(3) for _ in range(n)] if rank == 1 else None\n"
        "done(dist.scatter(out[0], parts, src=1, **call))"
    ),
    "isend, irecv": (
        "x, y = make(3), make(3)\n"
        "works = [dist.isend(x, peer, group=call.get('group')),"
        " dist.irecv(y, peer, group=call.get('group'))]\n"
        "[work.wait() for work in works]; out = [y]"
    ),
    "batch_isend_irecv": (
        "x, y = make(3), make(3)\n"
        "ops = [dist.P2POp(dist.isend, x, peer, call.get('group')),"
        " dist.P2POp(dist.irecv, y, peer, call.get('group'))]\n"
        "[work.wait() for work in dist.batch_isend_irecv(ops)]; out = [y]"
    ),
    "objects": (
        "x = make(2); everyone = [None] * n\n"
        "dist.all_gather_object(everyone, x.tolist(), group=call.get('group'))\n"
        "out = [torch.tensor(everyone)]"
    ),
}

RANKS = """
def main(rank, world, bodies, dtypes):
    import itertools
    mine = [r for r in (0, 1)] if rank < 2 else [2, 3]
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    outcomes = []
    for (name, body), dtype, grouped, later in itertools.product(
        bodies.items(), dtypes, (False, True), (False, True)
    ):
        if grouped and ("src=" in body or "dst=" in body or ", 1" in body):
            continue  # they name rank 1, which is not in every group
        if later and "isend" in body or later and name == "objects":
            continue
        results = []
        for device in (torch.device("cpu"), torch.device("vgpu", rank)):
            torch.manual_seed(rank)
            n, peer = (2, rank ^ 1) if grouped else (world, rank ^ 1)
            call = {"async_op": True} if later else {}
            if grouped:
                call["group"] = groups[rank // 2]

            def make(*size):
                values = torch.randint(-9, 9, size)
                return values.to(getattr(torch, dtype)).to(device)

            def done(work):
                if work is not None:
                    work.wait()

            scope = dict(globals(), **locals())
            exec(body, scope)
            assert all(t.device == device for t in scope["out"]) or name == "objects", name
            results.append([t.cpu() for t in scope["out"]])
        same = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        outcomes.append((name, dtype, grouped, later, same))
    return outcomes
"""


def test_every_collective_gives_what_it_gives_on_the_cpu():
    dtypes = ["float32", "float64", "int64", "float16"]
    ranks = launch.run(cell(RANKS)["main"], 4, COLLECTIVES, dtypes, gpu="V100", timeout_s=100)
    assert all(len(outcomes) > 100 for outcomes in ranks)
    assert not [o for outcomes in ranks for o in outcomes if not o[-1]]


def test_the_default_group_of_virtual_gpus_takes_both_kinds_of_tensors(tmp_path, monkeypatch):
    source = """
    def main(rank, world):
        dist.destroy_process_group()
        store = dist.FileStore(os.environ["STORE"], world)
        dist.init_process_group(store=store, rank=rank, world_size=world,
                                device_id=torch.device("vgpu", rank))
        x, y = torch.ones(2, device="vgpu"), torch.ones(2)
        dist.all_reduce(x)
        dist.all_reduce(y)
        dist.barrier()
        return dist.get_backend(), str(x.device), x.tolist(), y.tolist()
    """
    monkeypatch.setenv("STORE", str(tmp_path / "store"))
    found = launch.run(cell(source)["main"], 2, gpu="V100")
    assert found == [("vccl", f"vgpu:{rank}", [2.0, 2.0], [2.0, 2.0]) for rank in range(2)]


def test_each_rank_has_the_memory_that_was_asked_for():
    source = """
    def main(rank, world):
        kept = torch.ones(2**17, device="vgpu")
        try:
            torch.ones(2**18, device="vgpu")
        except torch.OutOfMemoryError as error:
            return str(error)
    """
    said = launch.run(cell(source)["main"], 2, gpu="H100", memory_bytes=2**20)
    for rank, message in enumerate(said):
        assert f"GPU {rank} has a total capacity of 1.00 MiB of which 512.00 KiB" in message


def test_a_hang_names_the_collective_on_virtual_tensors():
    source = """
    def main(rank, world):
        x = torch.ones(3, device="vgpu")
        if rank == 0:
            dist.all_reduce(x)
    """
    with pytest.raises(launch.RanksHung, match="rank 0 waits in all_reduce"):
        launch.run(cell(source)["main"], 2, gpu="V100", timeout_s=60)


@pytest.mark.parametrize(
    ("options", "phrase"),
    [
        ({"gpu": "Z9"}, "no GPU preset 'Z9'"),
        ({"memory_bytes": 5}, "name its kind too"),
        ({"gpu": "V100", "memory_bytes": 0}, "must be a positive number; found 0"),
    ],
)
def test_bad_gpus_are_refused(options, phrase):
    with pytest.raises(ValueError, match=phrase):
        launch.run(lambda rank, world: None, 2, **options)


def test_real_gpus_are_taken_where_there_are_enough(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.delenv("COURSE_DEVICES", raising=False)
    assert launcher._virtual_gpus(2, "V100", None) is None
    assert launcher._virtual_gpus(3, "V100", 7) == (vgpu.get_spec("V100"), 7)
    monkeypatch.setenv("COURSE_DEVICES", "vgpu")
    assert launcher._virtual_gpus(2, "V100", 7) == (vgpu.get_spec("V100"), 7)


def test_disabling_leaves_no_trace_in_torch_distributed():
    before = dict(dist.Backend.default_device_backend_map), list(dist.Backend.backend_list)
    with vgpu.enable(1):
        assert dist.get_default_backend_for_device("vgpu:0") == "vccl"
    after = dict(dist.Backend.default_device_backend_map), list(dist.Backend.backend_list)
    assert after == before and not hasattr(dist.Backend, "VCCL")
