"""One training iteration of DataParallel and of DistributedDataParallel, in virtual time.

Both run the model's own forward and backward as shapes. DataParallel is PyTorch's: one process,
whose threads queue for the interpreter's lock, which each launch of the forward pass needs for a
part of its time (``CostModel.locked_share``); every iteration broadcasts the parameters from GPU 0
and adds the gradients up there. For DDP one rank is run, with its share of the batch, and stands
for all: each has a process of its own, and all-reduces a bucket of gradients as soon as the
backward pass has filled it.

Left out of DDP: copying gradients into buckets, the broadcast of buffers, ranks that are not in
step. Left out of DataParallel: copying parameters into the buffers of a broadcast.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from helpers.vgpu.device import gpus
from helpers.vgpu.shapes import shapes_only
from helpers.vgpu.timing import recording
from helpers.vgpu.timing.recorder import record
from helpers.vgpu.timing.streams import Stream
from helpers.vgpu.timing.trace import Timeline

# torch.nn.parallel.DistributedDataParallel's own: bucket_cap_mb=25, and a first bucket of 1 MiB so
# that communication starts early (torch.distributed._DEFAULT_FIRST_BUCKET_BYTES).
FIRST_BUCKET_BYTES = 2**20
BUCKET_BYTES = 25 * 2**20

LossOf = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def data_parallel_iteration(
    make_model: Callable[[], nn.Module],
    inputs_size: tuple[int, ...],
    targets_size: tuple[int, ...],
    count: int,
    loss_of: LossOf = nn.functional.mse_loss,
    **changes: Any,
) -> Timeline:
    """One iteration of nn.DataParallel on ``count`` of the enabled GPUs.

    inputs_size and targets_size: of the whole batch. changes: fields of CostModel, as in record().
    """
    with shapes_only():
        model = nn.DataParallel(make_model().to(_gpu(0)), list(range(count)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inputs = torch.empty(inputs_size, device=_gpu(0))
        targets = torch.empty(targets_size, device=_gpu(0))
        loss_of(model(inputs), targets).backward()  # so that gradients exist, as in later steps
        with record(**changes) as timeline:
            optimizer.zero_grad(set_to_none=False)
            loss_of(model(inputs), targets).backward()
            optimizer.step()
    timeline.devices = timeline.devices[:count]
    return timeline


def ddp_iteration(
    make_model: Callable[[], nn.Module],
    inputs_size: tuple[int, ...],
    targets_size: tuple[int, ...],
    world_size: int,
    loss_of: LossOf = nn.functional.mse_loss,
    bucket_bytes: int = BUCKET_BYTES,
    **changes: Any,
) -> Timeline:
    """One iteration of DDP on ``world_size`` GPUs of the enabled kind, one process each.

    inputs_size and targets_size: of the whole batch, whose first dimension ``world_size`` divides.
    """
    if inputs_size[0] % world_size:
        raise ValueError(f"{world_size} ranks cannot share {inputs_size[0]} samples evenly")
    share = inputs_size[0] // world_size
    with shapes_only():
        model = make_model().to(_gpu(0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inputs = torch.empty((share, *inputs_size[1:]), device=_gpu(0))
        targets = torch.empty((share, *targets_size[1:]), device=_gpu(0))
        loss_of(model(inputs), targets).backward()
        with record(**changes) as timeline:
            optimizer.zero_grad(set_to_none=False)
            loss = loss_of(model(inputs), targets)
            reducer = _Reducer(model, world_size, bucket_bytes)
            loss.backward()
            reducer.finish()
            optimizer.step()
    _stand_for_all(timeline, world_size)
    return timeline


def buckets_of(model: nn.Module, bucket_bytes: int = BUCKET_BYTES) -> list[list[nn.Parameter]]:
    """The parameters in buckets, last ones first: about the order in which gradients come."""
    buckets: list[list[nn.Parameter]] = [[]]
    room_bytes = min(FIRST_BUCKET_BYTES, bucket_bytes)
    for parameter in reversed([p for p in model.parameters() if p.requires_grad]):
        if room_bytes <= 0:
            buckets.append([])
            room_bytes = bucket_bytes
        buckets[-1].append(parameter)
        room_bytes -= parameter.numel() * parameter.element_size()
    return buckets


class _Reducer:
    """Hands over one all-reduce a bucket, in order, each once its last gradient is there."""

    def __init__(self, model: nn.Module, world_size: int, bucket_bytes: int) -> None:
        assert recording.under_way is not None
        self._clock = clock = recording.under_way.clock
        self._world_size = world_size
        self._buckets = buckets_of(model, bucket_bytes)
        self._missing = [len(bucket) for bucket in self._buckets]
        self._next = 0
        self._compute = clock.stream(gpus.by_index(0), 0)
        self._communicate = clock.stream(gpus.by_index(0), Stream(_gpu(0)).stream_id)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._arrived(index))
            for index, bucket in enumerate(self._buckets)
            for parameter in bucket
        ]

    def _arrived(self, index: int) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            self._missing[index] -= 1
            while self._next < len(self._missing) and self._missing[self._next] == 0:
                self._reduce(self._buckets[self._next])
                self._next += 1

        return hook

    def _reduce(self, bucket: list[nn.Parameter]) -> None:
        clock, stream = self._clock, self._communicate
        size_bytes = sum(p.numel() * p.element_size() for p in bucket)
        duration_s = clock.model.collective_time_s("all_reduce", size_bytes, self._world_size)
        stream.wait_stream(self._compute)
        clock.collective("all_reduce", [stream], clock.hosts.engine(0), size_bytes, duration_s)

    def finish(self) -> None:
        """The optimizer's work starts after the last all-reduce."""
        assert self._next == len(self._buckets), "a parameter got no gradient"
        for handle in self._handles:
            handle.remove()
        self._compute.wait_stream(self._communicate)


def _stand_for_all(timeline: Timeline, world_size: int) -> None:
    """All ranks do the same at the same time: copy what rank 0 did."""
    mine = [event for event in timeline.events if event.device.type == gpus.DEVICE_TYPE]
    others = [event for event in timeline.events if event.device.type != gpus.DEVICE_TYPE]
    timeline.devices = [_gpu(index) for index in range(world_size)]
    timeline.events = sorted(
        [*others, *(event._replace(device=d) for event in mine for d in timeline.devices)],
        key=lambda event: (event.start_s, str(event.device), event.stream, event.launch_s),
    )


def _gpu(index: int) -> torch.device:
    return torch.device(gpus.DEVICE_TYPE, index)
