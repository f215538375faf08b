"""What is left behind when a rank's model is made."""

import gc
import weakref

import pytest

from helpers.plan.model import without_garbage


class Thing:
    def __init__(self):
        self.itself = self


@pytest.fixture
def nothing_is_collected():
    gc.disable()
    yield
    gc.enable()


def test_what_a_block_leaves_in_cycles_is_gone_after_it(nothing_is_collected):
    frozen = gc.get_freeze_count()
    kept = Thing()
    with without_garbage():
        inside = weakref.ref(Thing())
        assert inside() is not None
    assert inside() is None and kept.itself is kept
    assert gc.get_freeze_count() == frozen


def test_an_error_leaves_nothing_frozen():
    frozen = gc.get_freeze_count()
    with pytest.raises(LookupError), without_garbage():
        raise LookupError
    assert gc.get_freeze_count() == frozen
