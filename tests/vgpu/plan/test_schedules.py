"""Pipeline schedules: complete, deadlock-free, and with the papers' bubbles and memory."""

import math
from itertools import pairwise

import matplotlib.pyplot as plt
import pytest
from matplotlib.collections import PathCollection

from helpers import plots
from helpers.plots.schedules import number_path
from vgpu.plan import schedules
from vgpu.plan.schedules import (
    Action,
    DeadlockError,
    Schedule,
    Times,
    from_text,
    needs,
    peaks_in_flight,
    simulate,
)

SIZES = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 3, 4, 7, 8, 16)]
each_size = pytest.mark.parametrize(("p", "m"), SIZES)
each_kind = pytest.mark.parametrize("make", schedules.KINDS.values(), ids=schedules.KINDS)


def bubbles(times=None):
    """Yield every possible schedule for some sizes, simulated."""
    for p, m in SIZES:
        for make in schedules.KINDS.values():
            if make is not schedules.interleaved or m % p == 0:
                yield p, m, simulate(make(p, m), times)


@each_size
@pytest.mark.parametrize(
    "make", [schedules.all_forward_all_backward, schedules.one_forward_one_backward]
)
@pytest.mark.parametrize("backward", [1, 2, 3])
def test_the_bubble_equals_gpipes_for_any_backward_time(make, p, m, backward):
    times = Times(forward=1, input_gradient=backward / 2, weight_gradient=backward / 2)
    simulated = simulate(make(p, m), times)
    assert math.isclose(simulated.bubble, (p - 1) / (m + p - 1), abs_tol=1e-12)
    assert simulated.makespan == (m + p - 1) * (1 + backward)


@each_size
@pytest.mark.parametrize("v", [1, 2, 3, 4])
def test_interleaving_divides_the_bubble_by_the_number_of_chunks(p, m, v):
    if m % p:
        with pytest.raises(ValueError, match=f"in rounds of {p}"):
            schedules.interleaved(p, m, v)
        return
    simulated = simulate(schedules.interleaved(p, m, v))
    assert math.isclose(simulated.bubble, (p - 1) / (v * m + p - 1), abs_tol=1e-12)
    # A chunk takes its share of a device's time, so the work is the same as in the other schedules.
    assert math.isclose(sum(box.end - box.start for box in simulated.boxes[0]), 3 * m)
    # In units of a device's layers: p + (p - 1) / v, unless the batch ends before that.
    assert peaks_in_flight(simulated.schedule)[0] == min(v * p + p - 1, v * m)


@each_size
def test_zero_bubble_has_a_third_of_the_idle_time(p, m):
    simulated = simulate(schedules.zero_bubble(p, m))
    if m >= p:
        assert math.isclose(simulated.bubble, (p - 1) / (3 * m + p - 1), abs_tol=1e-12)
    assert simulated.makespan <= simulate(schedules.one_forward_one_backward(p, m)).makespan
    assert peaks_in_flight(simulated.schedule) == [min(p, m)] * p


@each_size
def test_gpipe_and_1f1b_keep_the_known_numbers_of_activations(p, m):
    assert peaks_in_flight(schedules.all_forward_all_backward(p, m)) == [m] * p
    expected = [min(p - device, m) for device in range(p)]
    assert peaks_in_flight(schedules.one_forward_one_backward(p, m)) == expected


def test_no_action_starts_before_its_inputs_are_ready():
    for _, _, simulated in bubbles(Times(2, 3, 1, transfer=0.5)):
        plan = simulated.schedule
        boxes = {box.action: box for row in simulated.boxes for box in row}
        assert set(boxes) == plan.actions
        for row, actions in zip(simulated.boxes, plan.rows, strict=True):
            assert [box.action for box in row] == list(actions)
            assert all(a.end <= b.start for a, b in pairwise(row))
        for action, box in boxes.items():
            for need in needs(action, plan):
                sent = plan.device_of(need.stage) != plan.device_of(action.stage)
                assert boxes[need].end + (0.5 if sent else 0) <= box.start


def test_the_order_for_one_host_respects_all_dependencies():
    for _, _, simulated in bubbles():
        place = {action: index for index, action in enumerate(simulated.order())}
        for action in place:
            for need in needs(action, simulated.schedule):
                assert place[need] < place[action]


def test_a_transfer_delays_only_the_neighbor():
    p, m = 2, 1
    simulated = simulate(schedules.one_forward_one_backward(p, m), Times(transfer=10))
    assert simulated.makespan == p * 3 + 2 * 10
    assert simulate(schedules.one_forward_one_backward(1, m), Times(transfer=10)).makespan == 3


def test_full_and_split_backwards_can_be_combined():
    # The last device splits its backward; the first doesn't, and needs only the first half.
    mixed = from_text(["F0 F1 B0 B1", "F0 I0 F1 I1 W0 W1"])
    assert simulate(mixed).makespan == 7
    assert set(needs(Action("B", 0, 0), mixed)) == {Action("F", 0, 0), Action("I", 0, 1)}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            ["F0 B0 F1 B1", "F0 F1 B0 B1"],
            "device 0 is at B0 and waits for B0, which comes later in the row of device 1; "
            "device 1 is at F1 and waits for F1, which comes later in the row of device 0",
        ),
        (
            ["F0 B0", "B0 F0"],
            "device 1 is at B0 and waits for F0, which comes later in its own row",
        ),
        (
            ["I0 F0 W0"],
            "device 0 is at I0 and waits for F0, which comes later in its own row",
        ),
    ],
)
def test_a_deadlock_is_detected_and_named(rows, said):
    with pytest.raises(DeadlockError) as caught:
        simulate(from_text(rows))
    assert said in str(caught.value)


def test_the_error_for_a_deadlock_names_only_devices_in_the_cycle():
    # Device 0 only waits for the cycle of devices 1 and 2.
    rows = ["F0 F1 B0 B1", "F0 B0 F1 B1", "F0 F1 B0 B1"]
    with pytest.raises(DeadlockError) as caught:
        simulate(from_text(rows))
    assert "device 0" not in str(caught.value)
    assert "device 1 is at B0" in str(caught.value) and "device 2 is at F1" in str(caught.value)
    assert caught.value.at == {0: "B0", 1: "B0", 2: "F1"}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "at least one device"),
        (["", ""], "at least one device, one chunk and one action"),
        (["F0 X0"], "device 0: 'X0' is not an action such as F0 or B3"),
        (["F0 F0 B0"], "device 0: 0F0 appears twice"),
        (["F0 B0", "F0"], "device 1: stage 1 runs F for micro-batch 0; expected F and B"),
        (["F0 B0 W0"], "stage 0 runs FBW for micro-batch 0"),
        (["F1 B1"], "stage 0 runs nothing for micro-batch 0"),
        (
            ["F0 B0", "F0 B0 0F1"],
            "device 1: 0F1 is for stage 0, which belongs in the row of device 0",
        ),
    ],
)
def test_a_schedule_rejects_missing_or_repeated_actions(rows, said):
    with pytest.raises(ValueError, match=said):
        from_text(rows)


@pytest.mark.parametrize("action", [Action("Q", 0, 0), Action("F", -1, 0), Action("F", 0, 1)])
def test_a_schedule_rejects_an_impossible_action(action):
    with pytest.raises(ValueError, match=r"device 0: .* isn't an action"):
        Schedule("odd", ((action, Action("B", 0, 0)),))


@each_kind
@pytest.mark.parametrize("counts", [(0, 4), (4, 0), (2.0, 4), (True, 4)])
def test_a_schedule_without_devices_or_micro_batches_is_rejected(make, counts):
    with pytest.raises(ValueError, match=r"must be (at least 1|an integer)"):
        make(*counts)


@each_kind
def test_a_schedule_can_be_read_back_from_its_text(make):
    made = make(4, 8)
    lines = [line.split(": ")[1] for line in str(made).splitlines()]
    assert from_text(lines, made.name) == made
    assert from_text([line.split() for line in lines], made.name) == made


@pytest.fixture
def numbers(monkeypatch):
    """The outlines and positions of the numbers on each panel that would have been shown."""
    found = []

    def keep(_):
        for axes in plt.gcf().axes:
            written = [each for each in axes.collections if isinstance(each, PathCollection)]
            found.append([(e.get_paths(), e.get_offsets().tolist()) for e in written])

    monkeypatch.setattr("helpers.plots.style.display", keep)
    return found


def test_the_figure_numbers_every_box_with_its_micro_batch(numbers):
    simulated = simulate(schedules.one_forward_one_backward(2, 3))
    plots.schedule(simulated, factor=10)
    (((outlines, places),),) = numbers
    boxes = [(row, box) for row, boxes in enumerate(simulated.boxes) for box in boxes]
    assert outlines == [number_path(str(box.action.micro_batch), 8) for _, box in boxes]
    assert places == [[5 * (box.start + box.end), row] for row, box in boxes]
    assert number_path("1", 8) is not number_path("2", 8)


def test_numbers_in_narrow_boxes_are_smaller(numbers):
    plots.schedule(simulate(schedules.interleaved(4, 8, 2)))
    (((outlines, _),),) = numbers
    assert {id(each) for each in outlines} == {id(number_path(str(i), 6)) for i in range(8)}


def test_boxes_without_room_have_no_number(numbers):
    plots.schedule(simulate(schedules.interleaved(8, 64)))
    assert numbers == [[]]


def test_multiple_schedules_share_one_scale(monkeypatch):
    limits = []

    def keep(_):
        limits.extend(a.get_xlim() for a in plt.gcf().axes)

    monkeypatch.setattr("helpers.plots.style.display", keep)
    plots.schedules({name: simulate(make(4, 4)) for name, make in schedules.KINDS.items()})
    assert len(limits) == 4 and set(limits) == {(0, 21)}
    assert plt.get_fignums() == []


def test_a_schedule_uses_each_stages_own_time():
    times = Times(by_stage=(1, 1, 2, 1))
    simulated = simulate(schedules.one_forward_one_backward(4, 8), times)
    assert [sum(box.end - box.start for box in row) for row in simulated.boxes] == [24, 24, 48, 24]
    # The slow stage sets the pace: it hardly waits between its first action and its last.
    slow = simulated.boxes[2]
    assert slow[-1].end - slow[0].start - 48 <= 2
    with pytest.raises(ValueError, match="has 4 stages; by_stage has 3"):
        simulate(schedules.one_forward_one_backward(4, 8), Times(by_stage=(1, 1, 1)))
