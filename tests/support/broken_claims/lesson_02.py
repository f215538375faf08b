"""Lesson 02: what ``data`` hides and ``detach`` does not."""

from broken_claims import Broken

EDIT = "y.data.clamp_(-0.5, 0.5)"

BROKEN = [
    Broken("A24", "data is a copy", edits=[(EDIT, "y.data.clone().clamp_(-0.5, 0.5)")]),
    Broken("A24", "autograd sees the edit", edits=[(EDIT, "y = y.clamp(-0.5, 0.5)")]),
    Broken("A25", "detach copies", edits=[("y.detach()", "y.detach().clone()")]),
    Broken("A25", "detach hides the edit", edits=[("y.detach()", "y.data")]),
]
