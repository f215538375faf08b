"""Typical mistakes in the exercises for lesson 16, and what the learner must be told."""

from wrong_answers import template

_delays = template(
    """
def launch_delays(rows):
    calls = [row for row in rows if row.get("cat") == "cuda_runtime"]
    calls = [row for row in calls if "correlation" in row["args"]]
    launched = dict((row["args"]["correlation"], {end}) for row in calls)
    kernels = {kernels}
    return [row["ts"] - launched[row["args"]["correlation"]] for row in kernels]
""",
    end='row["ts"] + row["dur"]',
    kernels='sorted((r for r in rows if r.get("cat") == "kernel"), key=lambda row: row["ts"])',
)


_IN_ORDER = """
def launch_delays(rows):
    spans = sorted((row for row in rows if row["ph"] == "X"), key=lambda row: row["ts"])
    launches = [row for row in spans if row["name"] == "cudaLaunchKernel"]
    kernels = [row for row in spans if row["cat"] == "kernel"]
    return [k["ts"] - min(l["ts"] + l["dur"] for l in launches) for k in kernels]
"""

_READING = {
    "A": ("loader", 15.0),
    "B": ("straggler", 2),
    "C": ("launches", 0.42),
    "D": ("gather", 2.5),
    "E": ("bubble", 0.40),
    "F": ("item", 24),
}


def _reading(**changes):
    return f"my_reading = { ({**_READING, **changes})!r}"


_page = template(
    """
def one_page(traces):
    rows, pids = [], {{}}
    first = min(trace["baseTimeNanoseconds"] for trace in traces)
    for rank, trace in enumerate(traces):
        later_us = {later}
        for row in trace["traceEvents"]:
            row = {copy}
            row["pid"] = {pid}
            if "ts" in row:
                row["ts"] += later_us
            if "id" in row:
                row["id"] = {id}
            if row["name"] == "process_name":
                row["args"] = {{"name": {name}}}
            rows.append(row)
    return rows
""",
    later='(trace["baseTimeNanoseconds"] - first) / 1e3',
    copy="dict(row)",
    pid=(
        'f"rank {rank}: {row[\'pid\']}" if isinstance(row["pid"], str) '
        'else pids.setdefault((rank, row["pid"]), len(pids))'
    ),
    id='row["id"] * len(traces) + rank',
    name="f\"rank {rank}: {row['args']['name']}\"",
)


_PEAK = """
def at_peak(trace):
    live, total, most, held = {}, 0, 0, []
    for entry in trace:
        if entry["action"] == "alloc":
            live[entry["addr"]] = entry
            total += entry["size"]
        elif entry["action"] == "free_completed" and entry["addr"] in live:
            total -= live.pop(entry["addr"])["size"]
        if total > most:
            most, held = total, list(live.values())
    by_function = {}
    for entry in held:
        name = entry["frames"][0]["name"] if entry["frames"] else ""
        by_function[name] = by_function.get(name, 0) + entry["size"]
    return by_function
"""

WRONG = {
    "16.1": [
        (_delays(end='row["ts"]'), "A launch ends at ts + dur"),
        (
            _delays(
                kernels='sorted((r for r in rows if r.get("cat") in ("kernel", "gpu_memcpy")), '
                'key=lambda row: row["ts"])'
            ),
            "none for copies",
        ),
        (
            _delays(
                kernels='sorted((r for r in rows if r.get("cat") == "kernel"), key=lambda row: '
                '-row["ts"])'
            ),
            "sort the kernels",
        ),
        (_IN_ORDER, "the same correlation"),
        ("def launch_delays(rows):\n    return 3", "Return a list of numbers"),
    ],
    "16.2": [
        ("my_reading = 3", "One entry for each trace"),
        ('my_reading = {"A": ("item", 3)}', "One entry for each trace"),
        (_reading(A=("late", 15)), "Use the table's names"),
        (_reading(A="loader"), "Return the fault's name and a number"),
        (_reading(A=("item", 8)), "waits for a value 0 times"),
        (_reading(B=("gather", 3.9)), "The collectives of rank 0 are: all_reduce"),
        (_reading(A=("straggler", 0)), "compare the ranks"),
        (_reading(C=("loader", 0.2)), "A batch takes 0.02 ms to arrive"),
        (_reading(C=("bubble", 0.66)), "A pipeline sends and receives"),
        (_reading(F=("launches", 0.7)), "right after its launch"),
        (_reading(B=("straggler", 0)), "whose GPU computes longest"),
        (_reading(C=("launches", 0.58)), "one minus the right one"),
        (_reading(C=("launches", 43)), "a percentage"),
        (_reading(A=("loader", 15_000)), "in µs: return"),
        (_reading(A=("loader", 0.015)), "in seconds: return"),
        (_reading(A=("loader", 4)), "has this number"),
        (_reading(F=("item", 72)), "for all three steps"),
    ],
    "16.3": [
        (_page(later='trace["baseTimeNanoseconds"] - first'), "divide by 1000"),
        (_page(later="0"), "baseTimeNanoseconds says when it started"),
        (_page(later='(first - trace["baseTimeNanoseconds"]) / 1e3'), "add the difference"),
        (_page(copy="row"), "Copy each event before you change it"),
        (_page(pid='row["pid"]'), "a string pid is itself a name"),
        (
            _page(pid='f"rank {rank}: {row[\'pid\']}" if row["pid"] == "Spans" else row["pid"]'),
            "number the pairs of rank and pid",
        ),
        (_page(pid="rank"), "a separate number for each pair of rank and pid"),
        (_page(id='row["id"]'), "Each rank counts its ids from 1"),
        (_page(id="f\"{rank}:{row['id']}\""), "Perfetto drops arrows"),
        (_page(name='row["args"]["name"]'), "An event named process_name"),
        # Numbers for all: right for each pid, but "Spans" has lost its name; or no number at all.
        (
            _page(pid='pids.setdefault((rank, row["pid"]), len(pids))'),
            "a string pid is itself a name",
        ),
        (_page(pid='row["pid"] * len(traces) + rank'), "A pid can be a string"),
        ("def one_page(traces):\n    return []", "all events of all ranks"),
        ("def one_page(traces):\n    return 3", "Return a list of events"),
    ],
    "16.4": [
        (_PEAK.replace("for entry in held", "for entry in live.values()"), "held at the end"),
        (_PEAK.replace('["frames"][0]', '["frames"][-1]'), "start with the innermost"),
        (
            _PEAK.replace(
                "for entry in held", 'for entry in [e for e in trace if e["action"] == "alloc"]'
            ),
            "ever allocated",
        ),
        (
            _PEAK.replace('entry["action"] == "alloc"', '"alloc" in entry["action"]'),
            "Blocks are parts of segments",
        ),
        (
            _PEAK.replace("free_completed", "free_requested"),
            "isn't free when its release is requested",
        ),
        (_PEAK.replace("by_function.get(name, 0) + ", ""), "from its alloc to"),
        ("def at_peak(trace):\n    return 3", "Return a dictionary"),
    ],
}
