"""What Perfetto makes of a trace's rows: a model of its JSON importer (json_trace_parser.cc).

Perfetto sorts rows by time, in whole nanoseconds; of those that start together, the longest span is
first, and arrows come last. Each track is a stack. A span that ends after the one that it starts in
is dropped or moved off its track. An arrow joins the spans that are on top of the stacks when it
starts and ends, and its id (with category and name) must not start twice.
"""

from collections import defaultdict
from typing import Any

Row = dict[str, Any]


def drawn(rows: list[Row]) -> tuple[list[Row], list[tuple[Row, Row]]]:
    """Return the spans that are drawn on their tracks, and the two spans of each arrow."""
    stacks: dict[Any, list[Row]] = defaultdict(list)
    spans, arrows, begun = [], [], {}
    for row in sorted((row for row in rows if row["ph"] in "Xsf"), key=_place):
        stack = stacks[row["pid"], row["tid"]]
        if row["ph"] == "X":
            start, end = _interval(row)
            while stack and _is_over(stack[-1], start, end):
                stack.pop()
            if all(end <= _interval(outer)[1] for outer in stack):
                stack.append(row)
                spans.append(row)
        elif stack:
            name = (row["id"], row["cat"], row["name"])
            if row["ph"] == "s":
                begun.setdefault(name, stack[-1])
            elif name in begun:
                arrows.append((begun[name], stack[-1]))
    return spans, arrows


def assert_is_drawn(rows: list[Row]) -> None:
    """Check that every span is drawn, and every arrow leads from a launch to what it launched."""
    spans, arrows = drawn(rows)
    on_tracks = {id(row) for row in spans}
    missing = [row for row in rows if row["ph"] == "X" and id(row) not in on_tracks]
    assert not missing, f"spans that overlap another on their track: {missing[:3]}"
    assert len(arrows) == sum(row["ph"] == "f" for row in rows)
    for launch, launched in arrows:
        assert launch["cat"] == "cuda_runtime" and launched["cat"] in ("kernel", "gpu_memcpy")
        assert launch["args"]["correlation"] == launched["args"]["correlation"]


def _place(row: Row) -> tuple[int, int, bool]:
    return round(row["ts"] * 1e3), -round(row.get("dur", 0) * 1e3), row["ph"] != "X"


def _interval(row: Row) -> tuple[int, int]:
    start = round(row["ts"] * 1e3)
    return start, start + round(row["dur"] * 1e3)


def _is_over(row: Row, start: int, end: int) -> bool:
    """Whether a span is over when another starts; spans without a duration stay on the stack."""
    began, ended = _interval(row)
    return ended < start or (ended == start and not began == ended == start == end)
