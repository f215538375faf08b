"""Where the bytes of each GPU are, by cause, at one moment or over the steps of an iteration."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

OTHER = "activations and other"


@dataclass(frozen=True)
class Snapshot:
    """One moment: for each device, bytes by cause, in the order in which causes were given."""

    step: str
    by_cause: dict[torch.device, dict[str, int]]

    def total_bytes(self, device: torch.device) -> int:
        """All that is allocated on ``device``."""
        return sum(self.by_cause[device].values())


def snapshot(
    step: str, gpus: Sequence[torch.device], known: Mapping[str, Iterable[torch.Tensor]]
) -> Snapshot:
    """Bytes on each of ``gpus`` now, split by cause.

    ``known`` maps a cause to its tensors, wherever they are. A tensor counts once, for the first
    cause that names it. What is allocated beyond the known tensors is ``OTHER``: mostly what
    autograd saved for the backward pass, and the allocator's rounding to 512 bytes.
    """
    module = torch.get_device_module(gpus[0])
    seen: set[tuple[torch.device, int]] = set()
    by_cause: dict[torch.device, dict[str, int]] = {}
    sizes = {gpu: dict.fromkeys(known, 0) for gpu in gpus}
    for cause, tensors in known.items():
        for tensor in tensors:
            place = (tensor.device, tensor.data_ptr())
            if tensor.device in sizes and place not in seen:
                seen.add(place)
                sizes[tensor.device][cause] += tensor.nbytes
    for gpu in gpus:
        rest = module.memory_allocated(gpu) - sum(sizes[gpu].values())
        by_cause[gpu] = {**sizes[gpu], OTHER: rest}
    return Snapshot(step, by_cause)


def peaks_during(step: Callable[[], object], gpus: Sequence[torch.device]) -> list[int]:
    """The most bytes that ``step()`` had on each of ``gpus``, beyond what was there before it."""
    module = torch.get_device_module(gpus[0])
    for gpu in gpus:
        module.reset_peak_memory_stats(gpu)
    before = [module.memory_allocated(gpu) for gpu in gpus]
    step()
    peaks = [module.max_memory_allocated(gpu) for gpu in gpus]
    return [peak - start for peak, start in zip(peaks, before, strict=True)]
