"""Checks for lesson 16: launch delays, six faults, all ranks on one page, who holds the peak."""

import copy
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

from helpers import faulty_traces
from helpers.checks.core import Wrong, exercise, for_input, hint_by_value
from vgpu import Timeline, covered_s

Row = dict[str, Any]


@exercise("16.1", "From the launch to the kernel")
def launch_delays(answer: Callable[[list[Row]], list[float]]) -> dict[str, Any]:
    for count in (1, 3, 6, 6):
        rows, expected = _launches(count)
        hint = "Return a list of numbers. Not every event has cat or args."
        with for_input(f"{count} kernels: {_short(rows)}", hint):
            yours = [round(float(delay), 3) for delay in answer(copy.deepcopy(rows))]
            if yours != expected:
                raise Wrong(yours=yours, expected=expected, hint=_delay_hint(yours, rows))
    return {"delays in the last test case, µs": str(yours)}


def _launches(count: int) -> tuple[list[Row], list[float]]:
    """Return kernels, a copy, and a call that launches nothing, in random order, and the delays."""
    rows: list[Row] = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "python"}}]
    numbers = random.sample(range(100, 999), count + 1)
    at, kernels = float(random.randint(0, 50)), []
    for place, number in enumerate(numbers):
        dur, delay = random.randint(3, 9), random.randint(1, 400)
        rows.append(_span("cuda_runtime", "cudaLaunchKernel", at, dur, correlation=number))
        kind = "gpu_memcpy" if place == count else "kernel"
        begins = at + dur + delay
        rows.append(_span(kind, "mm", begins, random.randint(2, 90), correlation=number))
        if kind == "kernel":
            kernels.append((begins, float(delay)))
        at += dur + random.randint(1, 9)
    rows.append(_span("cuda_runtime", "cudaDeviceSynchronize", at, 400))
    rows.append(
        {"ph": "s", "id": numbers[0], "pid": 1, "tid": 1, "ts": 0.0, "name": "ac2g", "cat": "ac2g"}
    )
    random.shuffle(rows)
    if len({begins for begins, _ in kernels}) < count:
        return _launches(count)
    return rows, [delay for _, delay in sorted(kernels)]


def _span(category: str, name: str, ts: float, dur: float, **args: int) -> Row:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 0,
        "tid": 0,
        "ts": ts,
        "dur": dur,
        "args": args,
    }


def _delay_hint(yours: list[float], rows: list[Row]) -> str:
    launches = {
        row["args"]["correlation"]: row
        for row in rows
        if row.get("cat") == "cuda_runtime" and row["args"]
    }
    on_gpu = sorted((r for r in rows if r.get("cat") in ("kernel", "gpu_memcpy")), key=_start)
    kernels = [row for row in on_gpu if row["cat"] == "kernel"]

    def delay(row: Row, from_start: bool = False) -> float:
        launch = launches[row["args"]["correlation"]]
        return round(row["ts"] - launch["ts"] - (0 if from_start else launch["dur"]), 3)

    right = [delay(row) for row in kernels]
    if yours == [delay(row, from_start=True) for row in kernels]:
        return "A launch ends at ts + dur: measure the delay from there."
    if len(yours) != len(right):
        return "Return one number for each event of category kernel, and none for copies."
    if sorted(yours) == sorted(right):
        return "The numbers are right, but in the wrong order: sort the kernels by ts."
    return "A kernel's launch is the event with the same correlation, not the one before it in the list."


def _start(row: Row) -> float:
    start: float = row["ts"]
    return start


def _short(rows: Sequence[Row]) -> str:
    spans = sorted((row for row in rows if row["ph"] == "X"), key=_start)
    texts = (
        f"{row['cat']} {row['args'].get('correlation', '')} at {row['ts']:g} for {row['dur']:g}"
        for row in spans
    )
    return ", ".join(texts)


# For each fault: the number that the exercise asks for, and what the trace's owner replies.
_FAULTS = {
    "item": ("waits per step", "So it was my NaN check after each layer!"),
    "gather": ("ms per step", "So it's the network. Or I could use more tokens per gather."),
    "straggler": ("the rank", "I'll sort the long texts into buckets."),
    "launches": ("share of the time in which GPU 0 computes", "I'll try CUDA graphs."),
    "loader": ("ms per batch", "More workers, then."),
    "bubble": ("share of the time in which GPU 0 doesn't compute", "More micro-batches, then."),
}


@exercise("16.2", "Six faults", callable_answer=False)
def six_faults(answer: Any) -> dict[str, Any]:
    form = 'a dictionary such as {"A": ("item", 3), "B": ...}, with all letters from A to F'
    traces = faulty_traces.traces()
    if not isinstance(answer, dict) or set(answer) != set(traces):
        hint = "One entry for each trace."
        raise Wrong(yours=repr(answer), expected=form, given="traces A to F", hint=hint)
    shown = {}
    for letter, trace in traces.items():
        with for_input(f"trace {letter}", "Return the fault's name and a number."):
            fault, number = answer[letter]
            number = float(number)
            if fault not in _FAULTS:
                names = ", ".join(_FAULTS)
                raise Wrong(yours=fault, expected=f"one of {names}", hint="Use the table's names.")
            if fault != trace.fault:
                raise Wrong(
                    yours=f"{fault!r}",
                    expected="a different fault",
                    hint=_why_not(fault, trace.timeline),
                )
            asked, reply = _FAULTS[fault]
            found = evidence(fault, trace.timeline)
            within = 0 if fault in ("straggler", "item") else 0.1 * found
            if abs(number - found) > within:
                raise Wrong(
                    yours=f"{fault}, {number:g}",
                    expected=f"{fault}, but a different number: {asked}",
                    hint=_number_hint(fault, number, found, trace.timeline),
                )
        proof = f"{number:g} ({asked}; the exact number is {found:.3g})"
        shown[f"{letter}: {fault}"] = f'{proof}. "{reply}"'
    return shown


def evidence(fault: str, timeline: Timeline) -> float:
    """Return the number that exercise 16.2 asks for."""
    computes = timeline.utilization("vgpu:0")
    if fault == "item":
        return _value_waits(timeline) / faulty_traces.STEPS
    if fault == "gather":
        return _alone_s(timeline, 0) * 1e3 / faulty_traces.STEPS
    if fault == "straggler":
        return max(timeline.ranks, key=lambda rank: timeline.busy_s(f"vgpu:{rank}"))
    if fault == "loader":
        loads = [each for each in timeline.host_ranges if each.name == faulty_traces.LOADER]
        return (loads[0].end_s - loads[0].start_s) * 1e3
    return computes if fault == "launches" else 1 - computes


def _value_waits(timeline: Timeline) -> int:
    """Return how many times the host of rank 0 waits for a value."""
    waits = (event for event in timeline.events if event.kind == "wait" and event.stream == 0)
    return sum(event.name != "synchronize" for event in waits)


def _alone_s(timeline: Timeline, rank: int) -> float:
    """Return how long a GPU runs collectives (from its rank's arrival on) and computes nothing."""
    gpu = f"vgpu:{rank}"
    spans = [
        event if event.ready_s is None else event._replace(start_s=event.ready_s)
        for event in timeline.of(gpu)
    ]
    return covered_s(spans) - timeline.busy_s(gpu)


def _why_not(fault: str, timeline: Timeline) -> str:
    """Return evidence from the trace that it doesn't have this fault."""
    busy = [timeline.busy_s(f"vgpu:{rank}") for rank in timeline.ranks]
    names = {event.name for event in timeline.of("vgpu:0") if event.kind == "collective"}
    if fault == "item":
        count = _value_waits(timeline)
        return f"The host of rank 0 waits for a value {count} times in the whole trace."
    if fault == "straggler":
        return f"GPUs compute for {min(busy) * 1e3:.1f} to {max(busy) * 1e3:.1f} ms: compare the ranks."
    if fault == "gather":
        return f"The collectives of rank 0 are: {', '.join(sorted(names)) or 'none'}."
    if fault == "bubble":
        return (
            f"A pipeline sends and receives; the collectives here are: {', '.join(sorted(names))}."
        )
    if fault == "loader":
        spent = evidence("loader", timeline) if timeline.host_ranges[0].kind == "work" else 0.0
        step_ms = timeline.makespan_s * 1e3 / faulty_traces.STEPS
        return f"A batch takes {spent:.2g} ms to arrive; a step takes {step_ms:.1f} ms."
    return (
        "Does the next kernel start right after its launch, and is the host's track without gaps?"
    )


def _number_hint(fault: str, number: float, found: float, timeline: Timeline) -> str:
    if fault == "straggler":
        return "It's the rank whose GPU computes longest, and whose collectives are shortest."
    steps = faulty_traces.STEPS
    wrong = {
        "That's for all three steps.": found * steps,
        "That's the other share: one minus the right one.": 1 - found
        if fault in ("launches", "bubble")
        else -1,
        "That's a percentage: return a share, from 0 to 1.": 100 * found,
        "That's in µs: return ms.": 1000 * found,
        "That's in seconds: return ms.": found / 1000,
        "That includes what overlaps with kernels: count only while GPU 0 computes nothing.": (
            timeline.copying_s("vgpu:0") * 1e3 / steps
        ),
    }
    otherwise = "reading(of_rank(six[letter], 0)) has this number, or what you need to compute it."
    return hint_by_value(number, wrong, otherwise, within=0.03)


@exercise("16.3", "One page")
def one_page(answer: Callable[[list[Row]], list[Row]]) -> dict[str, Any]:
    for ranks in (1, 2, 4):
        traces = [_trace() for _ in range(ranks)]
        given = f"{ranks} traces of {len(traces[0]['traceEvents'])} events"
        before = copy.deepcopy(traces)
        with for_input(given, "Return a list of events. A pid can be a string."):
            rows = list(answer(traces))
            names = [row["args"].get("mark") for row in rows if row["ph"] == "X"]
            if traces != before:
                raise Wrong(
                    yours="the given traces, modified",
                    expected="new events",
                    hint="Copy each event before you change it: {**event, ...}.",
                )
            # There can be more events: a process_name for the string pid.
            if len(rows) < sum(len(trace["traceEvents"]) for trace in traces) or None in names:
                raise Wrong(
                    yours=f"{len(rows)} events",
                    expected=f"{sum(len(trace['traceEvents']) for trace in traces)}",
                    hint="Return all events of all ranks, including their args.",
                )
        with for_input(given, "Events keep their keys: ph, pid, ts, and so on."):
            _check_page(rows, traces)
    return {
        "the last test case": f"{given}; {len(rows)} events, {len({row['pid'] for row in rows})} processes"
    }


def _trace() -> Row:
    """Return one rank's trace: pids and arrow ids that all ranks use, and one of Kineto's tracks."""
    base = 1_700_000_000_000_000_000 + random.randint(0, 10**6) * 1000
    rows: list[Row] = []
    for pid, name in ((0, "python"), (77, "python")):
        rows.append(
            {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": name}}
        )
    for number in range(1, 4):
        at = float(random.randint(0, 10_000))
        mark = random.randint(0, 10**9)
        launch = _span("cuda_runtime", "cudaLaunchKernel", at, 5, correlation=number, mark=mark)
        kernel = _span("kernel", "mm", at + 9, 80, correlation=number, mark=mark + 1)
        rows += [{**launch, "pid": 77}, kernel]
        for row, end in ((launch, "s"), (kernel, "f")):
            pid = 77 if end == "s" else 0
            arrow = {"ph": end, "id": number, "pid": pid, "tid": 0, "ts": row["ts"]}
            rows.append({**arrow, "cat": "ac2g", "name": "ac2g"})
    recorded = _span("Trace", "PyTorch Profiler (0)", 0.0, 10_000.0, mark=random.randint(0, 10**9))
    rows.append({**recorded, "pid": "Spans", "tid": "PyTorch Profiler"})
    return {"baseTimeNanoseconds": base, "traceEvents": rows}


def _check_page(rows: list[Row], traces: list[Row]) -> None:
    marks = {row["args"]["mark"]: row for row in rows if row["ph"] == "X"}
    first = min(trace["baseTimeNanoseconds"] for trace in traces)
    pids: list[set[Any]] = []
    for rank, trace in enumerate(traces):
        spans = [row for row in trace["traceEvents"] if row["ph"] == "X"]
        pids.append({marks[row["args"]["mark"]]["pid"] for row in spans})
        if len(pids[-1]) != 3:
            raise Wrong(
                yours=f"{len(pids[-1])} processes of rank {rank}",
                expected="3, as in that rank's trace",
                hint="Use a separate number for each pair of rank and pid.",
            )
        for row in spans:
            new = marks[row["args"]["mark"]]
            expected = row["ts"] + (trace["baseTimeNanoseconds"] - first) / 1e3
            if abs(new["ts"] - expected) > 0.01:
                raise Wrong(
                    yours=f"a span of rank {rank} at {new['ts']:.1f} µs",
                    expected=f"{expected:.1f} µs",
                    hint=_clock_hint(new["ts"], row["ts"], trace["baseTimeNanoseconds"] - first),
                )
    if len(set().union(*pids)) < sum(map(len, pids)):
        raise Wrong(
            yours="ranks with a pid in common",
            expected="separate processes for each rank",
            hint="GPU 0 of every rank has pid 0: number the pairs of rank and pid.",
        )
    for rank, own in enumerate(pids):
        _check_names(rows, own, rank)
    _check_arrows(rows, pids)


def _check_names(rows: list[Row], pids: set[Any], rank: int) -> None:
    names = [r["args"]["name"] for r in rows if r["name"] == "process_name" and r["pid"] in pids]
    names += [pid for pid in pids if isinstance(pid, str)]
    lacking = [name for name in names if not str(name).startswith(f"rank {rank}: ")]
    if lacking or len(names) < 3:
        raise Wrong(
            yours=f"processes of rank {rank} are named {names}",
            expected=f"names that begin with 'rank {rank}: '",
            hint="An event named process_name has the name in args, and the same pid as the other "
            "events; a string pid is itself a name.",
        )


def _check_arrows(rows: list[Row], pids: list[set[Any]]) -> None:
    rank_of = {pid: rank for rank, own in enumerate(pids) for pid in own}
    arrows: dict[Any, list[tuple[str, int]]] = {}
    for row in rows:
        if row["ph"] in ("s", "f"):
            arrows.setdefault(row["id"], []).append((row["ph"], rank_of.get(row["pid"], -1)))
    for name, ends in arrows.items():
        if not isinstance(name, int) and not re.fullmatch("(0x)?[0-9a-fA-F]+", str(name)):
            raise Wrong(
                yours=f"an arrow with the id {name!r}",
                expected="an integer",
                hint="Perfetto drops arrows whose id is neither an integer nor hexadecimal.",
            )
        if sorted(end for end, _ in ends) != ["f", "s"] or len({rank for _, rank in ends}) > 1:
            raise Wrong(
                yours=f"{len(ends)} ends of arrow {name!r}",
                expected="a start and an end, both from one rank",
                hint="Each rank counts its ids from 1: make them unique.",
            )


def _clock_hint(yours: float, own: float, later_ns: float) -> str:
    values = {
        "baseTimeNanoseconds is in nanoseconds: divide by 1000.": own + later_ns,
        "That's the rank's own clock: baseTimeNanoseconds says when it started.": own,
        "If a rank's clock started later, its times on the common clock are larger: add the "
        "difference.": own - later_ns / 1e3,
    }
    otherwise = "It's ts + (this rank's baseTimeNanoseconds - the smallest one) / 1000."
    return hint_by_value(yours, values, otherwise, within=1e-9)


@exercise("16.4", "Who holds the peak?")
def at_peak(answer: Callable[[list[Row]], dict[str, int]]) -> dict[str, Any]:
    for count in (3, 12, 40, 40):
        trace = _history(count)
        given = f"a history of {len(trace)} entries: {_short_history(trace)}"
        with for_input(given, "Return a dictionary from names to bytes."):
            yours = {str(name): int(size) for name, size in answer(copy.deepcopy(trace)).items()}
            expected = _held(trace, at_end=False)
            if yours != expected:
                raise Wrong(
                    yours=dict(sorted(yours.items())),
                    expected=dict(sorted(expected.items())),
                    hint=_peak_hint(yours, trace),
                )
    shown = ", ".join(f"{name or 'without frames'} {size:,}" for name, size in yours.items())
    return {"bytes in the last test case": shown}


_PLACES = ("load", "forward", "backward", "step")


def _history(count: int) -> list[Row]:
    """Return a history that reuses a few addresses again and again, and ends below its peak."""
    trace: list[Row] = [_entry("free_requested", 9, 512), _entry("free_completed", 9, 512)]
    trace.append(_entry("segment_alloc", 0, 20 * 2**20))
    live: dict[int, int] = {}
    for _ in range(count):
        free = [place for place in range(1, 9) if place not in live]
        if free and (not live or random.random() < 0.6):
            place, size = random.choice(free), 512 * random.randint(1, 64)
            names = random.choice((*(("empty", name) for name in _PLACES), ("load",), ()))
            trace.append(_entry("alloc", place, size, *names))
            live[place] = size
        else:
            place = random.choice(list(live))
            size = live.pop(place)
            trace += [_entry("free_requested", place, size), _entry("free_completed", place, size)]
    largest = _entry("alloc", 10, 512 * 1024, "forward")
    trace += [largest, _entry("free_requested", 10, largest["size"])]
    trace.append(_entry("alloc", 11, 512 * 16, "step"))  # the peak: block 10 isn't free yet
    trace += [_entry("free_completed", 10, largest["size"])]
    return [*trace, _entry("alloc", 10, 512, "step")]


def _entry(action: str, place: int, size: int, *names: str) -> Row:
    frames = [{"name": name, "filename": "train.py", "line": 3} for name in names]
    return {"action": action, "addr": place << 20, "size": size, "stream": 0, "frames": frames}


def _held(
    trace: list[Row], *, at_end: bool, outermost: bool = False, freed: str = "free_completed"
) -> dict[str, int]:
    live: dict[int, Row] = {}
    most, held = 0, list[Row]()
    for entry in trace:
        if entry["action"] == "alloc":
            live[entry["addr"]] = entry
        elif entry["action"] == freed:
            live.pop(entry["addr"], None)
        total = sum(each["size"] for each in live.values())
        if total > most or at_end:
            most, held = total, list(live.values())
    by_function: dict[str, int] = {}
    for entry in held:
        names = [frame["name"] for frame in entry["frames"]] or [""]
        name = names[-1 if outermost else 0]
        by_function[name] = by_function.get(name, 0) + entry["size"]
    return by_function


def _peak_hint(yours: dict[str, int], trace: list[Row]) -> str:
    right = sum(_held(trace, at_end=False).values())
    everything = sum(entry["size"] for entry in trace if entry["action"] == "alloc")
    if yours == _held(trace, at_end=True):
        return "That's what is held at the end: copy what's held at the peak."
    if yours == _held(trace, at_end=False, freed="free_requested"):
        return "A block isn't free when its release is requested: another stream may still use it."
    if yours == _held(trace, at_end=False, outermost=True):
        return "Frames start with the innermost: frames[0]."
    if sum(yours.values()) == everything:
        return "That's everything that was ever allocated: drop a block when it's freed."
    if sum(yours.values()) > everything:
        return "Blocks are parts of segments: only alloc and free_completed count."
    if sum(yours.values()) == right:
        return "The total is right, but the names are wrong: add up the blocks of each name."
    return "A block lives from its alloc to the free_completed of the same address."


def _short_history(trace: list[Row]) -> str:
    texts = [f"{entry['action']} {entry['addr'] >> 20}: {entry['size']}" for entry in trace[:8]]
    return ", ".join(texts) + (" ..." if len(trace) > 8 else "")
