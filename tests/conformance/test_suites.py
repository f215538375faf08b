"""A third of a suite leaves no operator, dtype, layout, mode or optimizer out."""

import pytest
from conformance import suites, test_vgpu_modules, test_vgpu_operators, test_vgpu_optimizers


@pytest.mark.parametrize(
    ("entries", "kind"),
    [
        (test_vgpu_operators.ENTRIES, test_vgpu_operators.name_of),
        (test_vgpu_operators.SPARSE_ENTRIES, test_vgpu_operators.name_of),
        (test_vgpu_modules.ENTRIES, test_vgpu_modules.name_of),
        (test_vgpu_optimizers.ENTRIES, test_vgpu_optimizers.kind_of),
    ],
)
def test_a_third_has_every_kind_and_every_variant(monkeypatch, entries, kind):
    monkeypatch.setattr(suites, "WHOLE", False)
    taken = suites.third(entries, kind)
    assert taken.items() <= entries.items() and len(taken) < len(entries)
    assert set(map(kind, taken.values())) == set(map(kind, entries.values()))
    endings = [{name.rpartition("-")[2] for name in names} for names in (taken, entries)]
    assert endings[0] == endings[1], "a dtype, layout or mode is in none of them"
    monkeypatch.setattr(suites, "WHOLE", True)
    assert suites.third(entries, kind) == entries
