"""What is left behind when a rank's model is made."""

import gc
import weakref

import pytest

from vgpu.plan.model import without_garbage
from vgpu.profiling.memory import has_frozen


class Thing:
    def __init__(self):
        self.itself = self


@pytest.fixture
def nothing_is_collected():
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(params=[False, True], ids=["nothing", "all"])
def frozen(request):
    """Whether what lives is frozen before the block. How much of it is tells nothing: it may go."""
    before = gc.get_freeze_count()
    gc.unfreeze()
    if request.param:
        gc.freeze()
    has_frozen.cache_clear()
    yield request.param
    has_frozen.cache_clear()
    gc.unfreeze()
    if before:
        gc.freeze()


def test_what_a_block_leaves_in_cycles_is_gone_after_it(nothing_is_collected, frozen):
    kept = Thing()
    with without_garbage():
        inside = weakref.ref(Thing())
        assert inside() is not None
    assert inside() is None and kept.itself is kept
    assert (gc.get_freeze_count() > 0) == frozen


def test_an_error_leaves_frozen_what_was(frozen):
    with pytest.raises(LookupError), without_garbage():
        raise LookupError
    assert (gc.get_freeze_count() > 0) == frozen
