"""Lesson 07: what keeps the replicas of DDP equal, and what each of its options does."""

from broken_claims import Broken

BY_HAND = {"claim": "C07", "cell": "compare-by-hand"}
REAL = {"claim": "C07", "cell": "run-the-real-one"}
REAL_RUN = 'enumerate(launch.run(on_a_rank, world_size, DDP, gpu="V100"))'
# The resumed run doesn't show that four epochs are enough.
_TWO_EPOCHS = [
    (
        "def train(rank, world_size, folder, epochs=4):",
        "def train(rank, world_size, folder, epochs=2):",
    ),
    ('assert finished["history"][-1][1] > 0.95', 'assert finished["history"][-1][1] > 0.5'),
]
DEAL = "[DistributedSampler(range(length), world_size, rank, **options)"


def real_run_with(wrap: str) -> list[tuple[str, str]]:
    return [(REAL_RUN, REAL_RUN.replace("DDP", wrap))]


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
        edits=[("dist.broadcast(tensor.data, src=0)", "pass")],
    ),
    Broken(**REAL, how="gradients stay on their ranks", edits=real_run_with("lambda model: model")),
    Broken(
        **REAL,
        how="each rank starts from its own weights",
        edits=real_run_with("lambda model: DDP(model, init_sync=False)"),
    ),
    Broken(
        "C08",
        "DDP sums",
        expensive=True,
        edits=[("    (factor * loss).backward()", "    (world_size * factor * loss).backward()")],
    ),
    Broken(
        "C11",
        "nothing is padded",
        cell="disjoint-but-padded",
        edits=[
            (
                "hands = deal(10, 4, shuffle=False)",
                "hands = deal(10, 4, shuffle=False, drop_last=True)",
            )
        ],
    ),
    Broken(
        "C13",
        "the epoch is counted",
        edits=[
            (
                "first, second = list(sampler), list(sampler)",
                "first = list(sampler); sampler.set_epoch(2); second = list(sampler)",
            )
        ],
    ),
    Broken(
        "C14",
        "batch norm is not converted",
        cell="sync-by-hand",
        edits=[
            (
                "nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3)).to(gpu)",
                "nn.BatchNorm1d(3).to(gpu)",
            )
        ],
    ),
    Broken(
        "C15",
        "buffers stay on their ranks",
        expensive=True,
        cell="buffers-at-init",
        edits=[
            (
                'together = launch.run(running_mean, 2, True, gpu="V100")',
                'together = launch.run(running_mean, 2, False, gpu="V100")',
            )
        ],
    ),
    Broken(
        "C15",
        "inputs stay where they are",
        cell="device-ids-error",
        edits=[("device_ids=[gpu.index] if ids else None", "device_ids=None")],
        error="RankRaised",
    ),
    Broken(
        "C15",
        "every rank uses every branch",
        cell="find-unused-works",
        edits=[
            (
                "return self.branches[which](x)",
                "return sum(branch(x) for branch in self.branches)",
            )
        ],
    ),
    Broken(
        "C16",
        "no barrier before the file is read",
        cell="with-the-barrier",
        edits=[("    if wait:\n        dist.barrier()\n", "")],
        error="FileNotFoundError",
    ),
    Broken(
        "C16",
        "the wrapper is saved",
        cell="with-the-barrier",
        edits=[
            (
                "torch.save(parallel.module.state_dict(), path)",
                "torch.save(parallel.state_dict(), path)",
            )
        ],
        error="Missing key(s)",
    ),
    Broken(
        "C17",
        "the forward stands outside of no_sync, and every backward sends",
        expensive=True,
        edits=[("if use_no_sync and micro < 3:", "if False:")],
    ),
    Broken(
        "C18",
        "the ranks have equally many batches",
        cell="unequal-hang",
        edits=[
            (
                "    for _ in range(3 + rank):\n        model(x)",
                "    for _ in range(3):\n        model(x)",
            )
        ],
    ),
    Broken(
        "C21",
        "the other host's share of the training is lost",
        expensive=True,
        cell="resume-the-run",
        shorter=_TWO_EPOCHS,
        edits=[("launch.run(train, 2, cut_run, ", "launch.run(train, 2, cut_run, 1, ")],
    ),
]
