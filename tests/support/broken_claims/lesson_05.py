"""Lesson 05: what DataParallel sums, sends, recreates in every forward, and throws away."""

from broken_claims import Broken

FRESH = "by_hand, real, single = fresh(), fresh(), fresh()"
MEAN_FOR_SUM = """
import unittest.mock
def mean_for_sum(inputs, destination=None):
    return tuple(sum(g.to(gpus[0]) for g in grads) / len(grads) for grads in zip(*inputs))
unittest.mock.patch("torch.nn.parallel.comm.reduce_add_coalesced", mean_for_sum).start()
"""
READS = "model, x, forwards = Reads().to(gpus[0]), torch.ones(2, 1), []\n"


def _with_replicate(replicas: str) -> str:
    """The line READS, after a DataParallel whose replicas come from elsewhere."""
    return f"""
import unittest.mock
kept = {{}}
def other(self, module, ids): return {replicas}
unittest.mock.patch("torch.nn.DataParallel.replicate", other).start()
{READS}"""


BROKEN = [
    Broken(
        "B13",
        "the outputs are small",
        old="torch.randint(4096, (batch_size,))",
        new="torch.randint(8, (batch_size,))",
        further=[
            (
                "nn.Linear(128, 4096)).to(gpus[0])\n    batch",
                "nn.Linear(128, 8)).to(gpus[0])\n    batch",
            )
        ],
    ),
    Broken("B27", "the replicas' gradients are averaged", old=FRESH, new=FRESH + MEAN_FOR_SUM),
    Broken(
        "B16",
        "replicas are kept from one forward to the next",
        old=READS,
        new=_with_replicate("kept.setdefault(module, replicate(module, ids))"),
    ),
    Broken(
        "B16",
        "the weights stay on GPU 0 and the module is shared",
        old=READS,
        new=_with_replicate("[module] * len(ids)"),
    ),
    Broken(
        "B17",
        "there's only one GPU, so nothing is replicated",
        old="nn.DataParallel(counter, gpus)",
        new="nn.DataParallel(counter, gpus[:1])",
    ),
    Broken(
        "B18",
        "there's only one GPU, which sees the whole batch",
        old="nn.DataParallel(norm, gpus)",
        new="nn.DataParallel(norm, gpus[:1])",
    ),
    Broken(
        "B31",
        "the replicas overlap, as they would without the lock",
        old="while time.thread_time() < started_s + 0.1:\n            pass",
        new="time.sleep(0.02)",
    ),
    Broken(
        "C20",
        "the chunks come through GPU 0",
        old="lambda: scatter(wide_batch, gpus)",
        new="lambda: scatter(wide_batch.to(gpus[0]), gpus)",
    ),
]
