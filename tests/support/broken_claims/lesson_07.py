"""Lesson 07: what keeps DDP's replicas identical, and what each of its options does."""

from broken_claims import Broken

BY_HAND = {"claim": "C07", "cell": "compare-by-hand"}
REAL = {"claim": "C07", "cell": "run-the-real-one", "expensive": True}
REAL_RUN = 'launch.run(on_a_rank, world_size, DDP, gpu="V100")'
# The resumed run doesn't show that four epochs are enough.
_TWO_EPOCHS = [
    (
        "def train(rank, world_size, folder, epochs=4):",
        "def train(rank, world_size, folder, epochs=2):",
    ),
    ('assert finished["history"][-1][1] > 0.95', 'assert finished["history"][-1][1] > 0.5'),
]
DEAL = "[DistributedSampler(range(length), world_size, rank, **options)"


BROKEN = [
    Broken(
        **BY_HAND,
        how="gradients are summed instead of averaged",
        old="parameter.grad /= dist.get_world_size()",
        new="pass",
    ),
    Broken(
        **BY_HAND,
        how="gradients stay on their ranks",
        old="    dist.all_reduce(parameter.grad)",
        new="    return",
    ),
    Broken(
        **BY_HAND,
        how="each rank starts from its own weights",
        old="dist.broadcast(tensor.detach(), src=0)",
        new="pass",
    ),
    Broken(
        **REAL,
        how="gradients stay on their ranks",
        old=REAL_RUN,
        new=REAL_RUN.replace("DDP", "lambda model: model"),
    ),
    Broken(
        **REAL,
        how="each rank starts from its own weights",
        old=REAL_RUN,
        new=REAL_RUN.replace("DDP", "lambda model: DDP(model, init_sync=False)"),
    ),
    Broken(
        "C08",
        "DDP sums",
        expensive=True,
        old="    (factor * loss).backward()",
        new="    (world_size * factor * loss).backward()",
    ),
    Broken(
        "C11",
        "nothing is padded",
        cell="disjoint-but-padded",
        old="hands = deal(10, 4, shuffle=False)",
        new="hands = deal(10, 4, shuffle=False, drop_last=True)",
    ),
    Broken(
        "C13",
        "the epoch is counted",
        old="first, second = list(sampler), list(sampler)",
        new="first = list(sampler); sampler.set_epoch(2); second = list(sampler)",
    ),
    Broken(
        "C14",
        "BatchNorm is not converted",
        expensive=True,
        cell="sync-by-hand",
        old="nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3)).to(gpu)",
        new="nn.BatchNorm1d(3).to(gpu)",
    ),
    Broken(
        "C15",
        "buffers stay on their ranks",
        expensive=True,
        cell="buffers-at-init",
        old='together = launch.run(running_mean, 2, True, gpu="V100")',
        new='together = launch.run(running_mean, 2, False, gpu="V100")',
    ),
    Broken(
        "C15",
        "inputs are not moved",
        expensive=True,
        cell="device-ids-error",
        old="device_ids=[gpu.index] if ids else None",
        new="device_ids=None",
        error="RankRaised",
    ),
    Broken(
        "C15",
        "every rank uses every branch",
        expensive=True,
        cell="find-unused-works",
        old="return self.branches[which](x)",
        new="return sum(branch(x) for branch in self.branches)",
    ),
    Broken(
        "C16",
        "no barrier before the file is read",
        expensive=True,
        cell="with-the-barrier",
        old="    if wait:\n        dist.barrier()\n",
        new="",
        error="FileNotFoundError",
    ),
    Broken(
        "C16",
        "the wrapper is saved",
        expensive=True,
        cell="with-the-barrier",
        old="torch.save(parallel.module.state_dict(), path)",
        new="torch.save(parallel.state_dict(), path)",
        error="Missing key(s)",
    ),
    Broken(
        "C17",
        "the forward is outside no_sync, so every backward communicates",
        expensive=True,
        old="if use_no_sync and micro < 3:",
        new="if False:",
    ),
    Broken(
        "C18",
        "the ranks have the same number of batches",
        expensive=True,
        cell="unequal-hang",
        old="    for _ in range(3 + rank):\n        model(x)",
        new="    for _ in range(3):\n        model(x)",
    ),
    Broken(
        "C21",
        "the other host's part of the training is lost",
        expensive=True,
        cell="resume-the-run",
        shorter=_TWO_EPOCHS,
        old="launch.run(train, 2, cut_run, ",
        new="launch.run(train, 2, cut_run, 1, ",
    ),
]
