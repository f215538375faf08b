"""Lesson 16's traces: each has the fault that the key names, and a link to download it."""

import base64
import gzip
import re

import pytest

import vgpu
from helpers import faulty_traces

# Links so fast, and launches so short, that they cost nothing.
NO_NETWORK = {"link": vgpu.Link("free", 1e15, 1e-12, "no such link")}
NO_LAUNCHES = {"python_launch_s": 1e-9, "engine_launch_s": 1e-9}


def step_s(timeline):
    return timeline.makespan_s / faulty_traces.STEPS


def without(letter, fault, timeline):
    """The seconds per step without one of the possible faults."""
    if fault == "gather":
        return step_s(vgpu.replay(timeline, **NO_NETWORK))
    if fault == "launches":
        return step_s(vgpu.replay(timeline, **NO_LAUNCHES))
    if fault == "straggler":
        return step_s(faulty_traces.straggler(rows=4096) if letter == "B" else timeline)
    if fault == "bubble":  # the same work: a quarter of a step with 20 micro-batches
        return step_s(faulty_traces.pipeline(20)) / 4 if letter == "E" else step_s(timeline)
    change = {"loader": {"loader_s": 0.0}, "item": {"looks": False}}[fault]
    return step_s(faulty_traces.data_parallel(letter, **change) if letter in "ACDF" else timeline)


@pytest.mark.parametrize("letter", "ABCDEF")
def test_the_named_fault_costs_more_than_any_other(letter):
    fault, timeline = faulty_traces.traces()[letter]
    faults = [trace.fault for trace in faulty_traces.traces().values()]
    whole_s = step_s(timeline)
    costs = {other: whole_s - without(letter, other, timeline) for other in faults}
    # In F, the host is late after each value that it reads, so faster launches would also make it less late.
    others = {name: s for name, s in costs.items() if (letter, name) != ("F", "launches")}
    second = max(s for name, s in others.items() if name != fault)
    assert costs[fault] == max(costs.values())
    assert costs[fault] > max(0.2 * whole_s, 4 * second), costs


def test_a_download_contains_the_complete_trace(tmp_path):
    paths = {letter: tmp_path / f"{letter}.json" for letter in "AB"}
    for letter, path in paths.items():
        path.write_text(f'{{"traceEvents": [], "letter": "{letter}"}}')
    links = re.findall(
        r'download="(.*?)\.gz" href=".*?base64,(.*?)"', faulty_traces.downloads(paths).data
    )
    packed = {name: gzip.decompress(base64.b64decode(held)) for name, held in links}
    assert packed == {path.name: path.read_bytes() for path in paths.values()}
