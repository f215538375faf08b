"""The list of torch's private names matches the code; tests/vgpu/test_torch_private_names.py tests
the names.
"""

import re

import pytest
from private_names import listed, uses

LISTED = {name for each in listed.RELIANCES for name in each.names}
# Attributes of Python and of the C++ library, and of objects such as torch.TypedStorage and
# pipeline stages.
NOT_TORCH = {
    "_ZSt13set_terminatePFvvE",
    "_config",
    "_current_frames",
    "_exit",
    "_extra_reducers",
    "_forkserver",
    "_getframe",
    "_lru_cache_wrapper",
    "_replace",
}
OF_OBJECTS = {"_untyped_storage", "_user_meta"}


@pytest.fixture(scope="module", autouse=True)
def sources_go():
    """Garbage collections after this file have fewer objects to go through."""
    yield
    uses.sources.cache_clear()


def covered(name):
    """Whether a name is listed, or is a module from which a listed name is used."""
    return any(other == name or other.startswith(f"{name}.") for other in LISTED)


def test_every_private_name_that_the_code_uses_is_listed():
    missing = {name: files for name, files in uses.uses().items() if not covered(name)}
    assert not missing, "enter them in tests/support/private_names/listed.py"


def test_private_attributes_of_objects_are_listed():
    known = {part for name in LISTED for part in name.split(".")} | NOT_TORCH | OF_OBJECTS
    found = uses.foreign_attributes()
    missing = {name: place for name, place in found.items() if name not in known}
    assert not missing, "enter them in tests/support/private_names/listed.py, by their class"


def test_every_listed_private_name_is_used():
    words = set(re.findall(r"\w+", uses.text()))
    unused = [name for name in LISTED if name.split(".")[-1] not in words]
    assert not unused, "take them out of tests/support/private_names/listed.py"
