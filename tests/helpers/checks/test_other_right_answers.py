"""Right answers that are not the lesson's solution pass as well, whatever numbers are drawn."""

import pytest

from teaching import lessons
from teaching.judging.judge import outcome_of

OTHERS = {
    "12.3": (
        "def tokens_to_hide(gpus, flop_per_s, bytes_per_s):\n"
        "    import math\n"
        "    return math.ceil((gpus - 1) / gpus * flop_per_s / bytes_per_s)"
    ),
    "14.2": (
        "def attend(query, blocks):\n"
        "    best, total, output = None, 0, 0\n"
        "    for number, (keys, values) in enumerate(blocks):\n"
        "        scores = torch.einsum('bhsd,bhcd->bhsc', query, keys) / query.size(-1) ** 0.5\n"
        "        new = scores.max(-1, keepdim=True).values\n"
        "        new = new if best is None else torch.maximum(new, best)\n"
        "        shrink = 0 if best is None else (best - new).exp()\n"
        "        weights = (scores - new).exp()\n"
        "        total = total * shrink + weights.sum(-1, keepdim=True)\n"
        "        output = output * shrink + weights @ values\n"
        "        best = new\n"
        "    return output / total"
    ),
    "14.4": (
        "def within_capacity(chosen, experts, capacity):\n"
        "    kept = torch.zeros(len(chosen), dtype=torch.bool)\n"
        "    for expert in range(experts):\n"
        "        kept[(chosen == expert).nonzero()[:capacity]] = True\n"
        "    return kept"
    ),
}


@pytest.mark.parametrize("exercise_id", OTHERS)
def test_another_right_answer_passes(exercise_id):
    (path,) = (p for p in lessons.NOTEBOOKS if exercise_id in lessons.exercise_ids(p))
    for _ in range(5):
        outcome = outcome_of(path, exercise_id, OTHERS[exercise_id])
        assert outcome.status == "right", str(outcome)
