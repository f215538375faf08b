"""What watchers record: graphs that are still held, and copies for which the host waits."""

import pytest
import torch

import vgpu
from helpers.checks.watchers import ReadBacks, WatchedLinear


def held_by(backward):
    """Return what a layer records in three forward passes, each followed by ``backward(loss)``."""
    layer = WatchedLinear(3, 1)
    kept = [backward(layer(torch.ones(count, 3)).sum()) for count in (4, 5, 6)]
    assert layer.samples == [4, 5, 6]
    assert len(kept) == 3
    return layer.graphs_held


def test_kept_losses_hold_every_graph():
    assert held_by(lambda loss: loss) == [0, 1, 2]
    assert held_by(lambda loss: loss.backward(retain_graph=True) or loss) == [0, 1, 2]


def test_a_kept_loss_holds_nothing_after_backward():
    assert held_by(lambda loss: loss.backward() or loss) == [0, 0, 0]


def test_a_graph_without_references_is_not_held():
    assert held_by(lambda loss: loss.detach()) == [0, 0, 0]


@pytest.mark.parametrize(
    ("ask", "count"),
    [
        (lambda x, host: x.sum().item(), 1),
        (lambda x, host: x.cpu(), 1),
        (lambda x, host: host.copy_(x), 1),
        (lambda x, host: bool(torch.equal(x, x)), 1),
        (lambda x, host: x.copy_(host), 0),
        (lambda x, host: torch.empty_like(x).copy_(x), 0),
        (lambda x, host: x.to(torch.float64), 0),
        (lambda x, host: host.sum().item(), 0),
    ],
)
def test_only_copies_from_a_gpu_to_the_host_count_as_read_back(ask, count):
    with vgpu.enable(1):
        x, host = torch.ones(3, device="vgpu:0"), torch.ones(3)
        with ReadBacks("vgpu") as asked:
            ask(x, host)
    assert asked.count == count
