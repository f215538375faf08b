"""``torch.vgpu.memory._snapshot``: all GPUs' memory, in ``torch.cuda.memory._snapshot``'s format.

PyTorch's viewers can read it: ``torch.cuda._memory_viz`` and https://docs.pytorch.org/memory_viz.
Blocks are where CUDA's caching allocator would put them (caching_allocator.py).

A snapshot leaves out C++ frames, frames for frees, sizes before rounding up to 512 bytes, times
(entries are numbered instead), and failed allocations.
"""

import pickle
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vgpu.memory import gpus
from vgpu.memory.blocks import DeviceMemory, MemoryEvent, MemoryRecord, record_memory
from vgpu.memory.caching_allocator import SEGMENT_DISTANCE_BYTES, CachingAllocator, Segment

Frame = dict[str, Any]

_OWN = str(Path(__file__).parents[1])
_MOST_FRAMES = 40


@dataclass
class _History:
    """The recording that ``record_history`` started."""

    record: MemoryRecord | None = None
    most_entries: int = sys.maxsize
    block: ExitStack = field(default_factory=ExitStack)  # the record_memory block


_history = _History()


def record_history(
    enabled: Literal["state", "all"] | None = "all",
    context: str | None = "all",
    stacks: str = "all",
    max_entries: int = sys.maxsize,
    device: Any = None,
    clear_history: bool = False,
) -> None:
    """Record allocations and frees on all GPUs from now on; ``enabled=None`` stops recording.

    A snapshot has the last ``max_entries`` entries for each GPU. A second call keeps the earlier
    history unless ``clear_history`` is set. ``context``, ``stacks`` and ``device`` have no effect.
    """
    if enabled is None or clear_history:
        _history.block.close()
        _history.record = None
    if enabled is not None and _history.record is None:
        _history.record = _history.block.enter_context(record_memory(_stack))
    _history.most_entries = max_entries


def snapshot(device: Any = None) -> dict[str, Any]:
    """Return each GPU's segments with their blocks, and its history if that's being recorded.

    With ``device``, return only that GPU's segments and history.
    """
    wanted = range(gpus.device_count()) if device is None else [gpus.meant_by(device).index]
    segments: list[dict[str, Any]] = []
    traces: list[list[dict[str, Any]]] = [[] for _ in range(gpus.device_count())]
    for index in wanted:
        memory = gpus.by_index(index).memory.settled()
        if _history.record is None:
            of_gpu = [_segment(index, each, {}) for each in memory.layout()]
        else:
            of_gpu, traces[index] = _replayed(_history.record, memory)
        segments += of_gpu
    return {
        "segments": segments,
        "device_traces": traces,
        "allocator_settings": {},
        "external_annotations": [],
    }


def dump(filename: str | Path = "dump_snapshot.pickle") -> None:
    """Write a snapshot to a file."""
    Path(filename).write_bytes(pickle.dumps(snapshot()))


def _stack() -> str:
    """Return an allocation's Python frames outside this package, innermost first, as text."""
    frame = sys._getframe(1)
    lines: list[str] = []
    while frame is not None and len(lines) < _MOST_FRAMES:
        code = frame.f_code
        if not code.co_filename.startswith(_OWN):
            lines.append(f"{code.co_filename}\t{frame.f_lineno}\t{code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return "\n".join(lines)


def _frames(label: str) -> list[Frame]:
    rows = (line.split("\t") for line in label.splitlines())
    return [
        {"filename": name, "line": int(line), "name": function} for name, line, function in rows
    ]


def _replayed(
    record: MemoryRecord, memory: DeviceMemory
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return one GPU's final segments and its trace."""
    allocator = CachingAllocator(memory.device, memory.capacity_bytes, may_exceed_capacity=True)
    trace = _Trace(allocator)
    blocks: dict[int, MemoryEvent] = {}  # in use
    for event in record.replay(allocator):
        trace.add(event)
        if event.block_bytes:
            blocks[event.block] = event
        else:
            blocks.pop(event.block, None)
    segments = [_segment(memory.device.index, each, blocks) for each in allocator.layout()]
    return segments, trace.entries[-_history.most_entries :]


class _Trace:
    """The history of one GPU, as entries of a snapshot."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self.entries: list[dict[str, Any]] = []
        self._allocator = allocator
        self._reserved_bytes = 0
        self._segments: dict[int, tuple[int, int]] = {}  # address → bytes, stream
        self._blocks: dict[int, tuple[int, int, int]] = {}  # number → address, bytes, stream

    def add(self, event: MemoryEvent) -> None:
        if self._allocator.reserved_bytes != self._reserved_bytes:
            self._note_segments()
        old = self._blocks.pop(event.block, None)
        if event.block_bytes:
            address, stream = self._allocator.address(event.block), event.stream or 0
            self._blocks[event.block] = address, event.block_bytes, stream
            self._add("alloc", address, event.block_bytes, stream, _frames(event.label))
        if old is not None:
            self._add("free_requested", *old)
            self._add("free_completed", *old)

    def _note_segments(self) -> None:
        self._reserved_bytes = self._allocator.reserved_bytes
        now = {
            each.pieces[0][0]: (sum(size for _, size, _ in each.pieces), each.stream)
            for each in self._allocator.layout()
        }
        for address in self._segments.keys() - now.keys():
            self._add("segment_free", address, *self._segments[address])
        for address in now.keys() - self._segments.keys():
            self._add("segment_alloc", address, *now[address])
        self._segments = now

    def _add(
        self,
        action: str,
        address: int,
        size_bytes: int,
        stream: int,
        frames: list[Frame] | None = None,
    ) -> None:
        place = {"addr": _shown(address), "size": size_bytes, "stream": stream}
        entry = {"action": action, **place, "time_us": len(self.entries), "frames": frames or []}
        self.entries.append(entry)


def _shown(address: int) -> int:
    """Map an address to one below 2^53, since PyTorch's viewer reads it as a JavaScript number."""
    segment, offset = divmod(address, SEGMENT_DISTANCE_BYTES)
    return (segment << 38) + offset


def _segment(index: int, segment: Segment, blocks: dict[int, MemoryEvent]) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for address, size_bytes, number in segment.pieces:
        event = blocks.get(number) if number is not None else None
        rows.append(
            {
                "address": _shown(address),
                "size": size_bytes,
                "requested_size": event.block_bytes if event else size_bytes,
                "state": "inactive" if number is None else "active_allocated",
                "frames": _frames(event.label) if event else [],
            }
        )
    used = [row for row in rows if row["state"] == "active_allocated"]
    allocated_bytes, requested_bytes = (
        sum(row[name] for row in used) for name in ("size", "requested_size")
    )
    return {
        "device": index,
        "address": rows[0]["address"],
        "total_size": sum(row["size"] for row in rows),
        "allocated_size": allocated_bytes,
        "active_size": allocated_bytes,
        "requested_size": requested_bytes,
        "stream": segment.stream,
        "segment_type": "small" if segment.is_small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": rows,
    }
