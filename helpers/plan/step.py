"""A plan of a training on a cluster, and what one step of it takes: time, bytes, tokens."""

import dataclasses

from helpers import vgpu
from helpers.models import TransformerSizes
from helpers.parallel import Layout, check_tensors
from helpers.plan.napkin import flop_per_token
from helpers.vgpu.timing.trace import covered_s

CHECKPOINTS = ("none", "selective", "full")
"""What of a block is computed again in backward: nothing, all but attention and every second matrix
product (torchtitan's "selective op"), or everything."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """A transformer of some sizes, a cluster, and how one is spread over the other."""

    sizes: TransformerSizes
    layout: Layout
    batch: int = 1
    """Sequences a step on each rank; ranks that share tensors compute on the same ones."""
    sequence: int = 8192
    checkpoint: str = "none"
    reshard_after_forward: bool = True
    gpu: str | vgpu.GPUSpec = "H100"
    gpus_per_host: int = 8
    network: str = "InfiniBand NDR"

    def __post_init__(self) -> None:
        for name in ("batch", "sequence", "gpus_per_host"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.checkpoint not in CHECKPOINTS:
            raise ValueError(
                f"checkpoint must be one of {', '.join(CHECKPOINTS)}, got {self.checkpoint!r}"
            )
        ranks, each = self.layout.ranks, self.gpus_per_host
        if ranks > each and ranks % each:
            raise ValueError(
                f"{ranks} ranks ({self.layout}) do not fill hosts of {each} GPUs; make it a "
                f"multiple of {each}"
            )
        check_tensors(self.sizes, self.layout.tensors, self.sequence)

    @property
    def spec(self) -> vgpu.GPUSpec:
        return vgpu.get_spec(self.gpu)

    @property
    def hosts(self) -> int:
        return max(1, self.layout.ranks // self.gpus_per_host)

    @property
    def tokens(self) -> int:
        """Tokens a step, on all ranks together."""
        return self.batch * self.sequence * self.layout.batches


@dataclasses.dataclass(frozen=True)
class Step:
    """What a step of rank 0 takes: virtual time and counted bytes."""

    plan: Plan
    timeline: vgpu.Timeline
    allocated_bytes: int
    """The most that tensors take at once."""
    reserved_bytes: int
    """The most that PyTorch's allocator takes from the GPU for them."""
    state_bytes: dict[str, int]
    """Parameters and optimizer state, which stay on this rank from step to step."""
    peak_by_cause: dict[str, int] = dataclasses.field(default_factory=dict)
    """What is allocated at the peak, as ``helpers.peaks`` counts it."""

    @property
    def seconds(self) -> float:
        return self.timeline.makespan_s

    @property
    def tokens_per_s(self) -> float:
        """Of one GPU."""
        return self.plan.tokens / self.plan.layout.ranks / self.seconds

    @property
    def utilisation(self) -> float:
        """The model's FLOPs, and nothing computed again, over what the datasheet's GPU could do."""
        flop = flop_per_token(self.plan.sizes, self.plan.sequence) * self.tokens_per_s
        return flop / self.plan.spec.tensor_flop_per_s

    @property
    def fits(self) -> bool:
        return self.reserved_bytes <= self.plan.spec.memory_bytes

    @property
    def bytes_by_cause(self) -> dict[str, int]:
        """What is allocated at the peak: what stays on this rank, and what comes and goes."""
        if self.peak_by_cause:
            return self.peak_by_cause
        passing = self.allocated_bytes - sum(self.state_bytes.values())
        return {**self.state_bytes, "gradients, gathered parameters, activations": passing}

    @property
    def time_by_cause(self) -> dict[str, float]:
        """Seconds of the step: computing, each collective that nothing hides, and the rest."""
        kernels = [event for event in self.timeline.events if event.kind == "kernel"]
        sent = [event for event in self.timeline.events if event.kind == "collective"]
        causes = {"computing": covered_s(kernels)}
        seen, known_s = list(kernels), causes["computing"]
        for name in sorted({event.name for event in sent}):
            seen += [event for event in sent if event.name == name]
            now_s = covered_s(seen)
            causes[f"waiting for {name}"] = now_s - known_s
            known_s = now_s
        causes["waiting for the host"] = self.seconds - known_s
        return causes
