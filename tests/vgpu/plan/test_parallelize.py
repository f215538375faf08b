"""What is left behind when a rank's model is divided."""

import gc
import weakref

import pytest

from vgpu.plan.parallelize import without_garbage


class Cycle:
    def __init__(self):
        self.itself = self


def test_cycles_that_a_block_leaves_are_collected_at_its_end():
    kept, inside = Cycle(), None
    with without_garbage():
        inside = weakref.ref(Cycle())
        assert not gc.isenabled() and inside() is not None
    assert gc.isenabled() and inside() is None and kept.itself is kept


@pytest.mark.parametrize("enabled", [True, False])
def test_an_error_leaves_automatic_collection_as_it_was(enabled):
    if not enabled:
        gc.disable()
    try:
        with pytest.raises(LookupError), without_garbage():
            raise LookupError
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
