"""Explorer for sharding: bytes per GPU by cause, and bytes sent, by model, GPUs and what's sharded.

With mixed precision and Adam, there are 2 bytes of parameters, 2 of gradients and 12 of optimizer
state for each parameter (Rajbhandari et al., 2020, "ZeRO", 3.1). Activations are left out.
"""

from dataclasses import dataclass

import ipywidgets
from IPython.display import display

import vgpu
from helpers import plots
from helpers.widgets.live import explorer, steps
from vgpu.plan.transformer import LLAMA, TransformerSizes
from vgpu.tables import Table
from vgpu.units import format_bytes

GPUS_PER_HOST = 8

_BYTES = {"parameters": 2, "gradients": 2, "optimizer state": 12}

# What each way shards.
_CUT: dict[str, tuple[str, ...]] = {
    "nothing (DDP)": (),
    "optimizer state (ZeRO-1)": ("optimizer state",),
    "gradients too (ZeRO-2)": ("optimizer state", "gradients"),
    "parameters too (ZeRO-3, FSDP)": tuple(_BYTES),
    "parameters too, inside each host (HSDP)": tuple(_BYTES),
}
WAYS = tuple(_CUT)


@dataclass(frozen=True)
class Answer:
    """Bytes per GPU by cause, and the bytes that a GPU sends per step, on average.

    ``inside_bytes`` stay inside the host; ``across_bytes`` go to other hosts.
    """

    parameters: int
    held: dict[str, int]
    inside_bytes: float
    across_bytes: float

    @property
    def at_rest_bytes(self) -> int:
        """The bytes held between steps, when no blocks are gathered."""
        return sum(size for cause, size in self.held.items() if cause != "gathered")


def answer(sizes: TransformerSizes, gpus: int, way: str) -> Answer:
    """Return the bytes that a GPU holds and sends if this transformer is sharded this ``way``.

    The ``gpus`` GPUs are on hosts of 8. Blocks are gathered in full, each while the previous one
    computes. The bytes sent are those of ring collectives: groups of up to 8 stay inside a host; a
    larger ring leaves each host once. Raises ValueError for more than 8 GPUs that don't fill hosts.
    """
    if gpus < 1 or (gpus > GPUS_PER_HOST and gpus % GPUS_PER_HOST):
        raise ValueError(f"{gpus} GPUs are neither full hosts of {GPUS_PER_HOST} nor part of one")
    count = sizes.parameters
    hybrid = way == WAYS[-1]
    ways = min(gpus, GPUS_PER_HOST) if hybrid else gpus
    held = {
        cause: -(-count * each // ways) if cause in _CUT[way] else count * each
        for cause, each in _BYTES.items()
    }
    tensor_bytes = 2 * count  # parameters and gradients travel in bfloat16
    if "parameters" in _CUT[way] and ways > 1:
        held["gathered"] = 2 * 2 * sizes.blocks_parameters // sizes.layers
    rounds = 3 if "parameters" in _CUT[way] else 2
    sent = rounds * (ways - 1) / ways * tensor_bytes
    hosts = gpus // ways
    slices = 2 * (hosts - 1) / hosts * tensor_bytes / ways if hybrid else 0.0
    # In a longer ring, one of a host's GPUs sends to the next host.
    across = slices if ways <= GPUS_PER_HOST else sent / GPUS_PER_HOST
    inside = sent if ways <= GPUS_PER_HOST else sent - across
    return Answer(count, held, inside, across)


def answer_table(result: Answer, gpus: int, gpu: str) -> Table:
    """Return the answer as a table: whether it fits, and what's sent."""
    room = vgpu.PRESETS[gpu].memory_bytes
    held = sum(result.held.values())
    verdict = "fits, without activations" if held <= room else "does not fit"
    how_sent = "by each GPU per step, on average"
    return Table(
        (f"{result.parameters / 1e9:.1f} billion parameters on {gpus} × {gpu}", "", ""),
        [
            ("on each GPU", format_bytes(held), f"of {format_bytes(room)}: {verdict}"),
            ("sent inside the host", format_bytes(result.inside_bytes), how_sent),
            ("sent across hosts", format_bytes(result.across_bytes), how_sent),
        ],
        caption="calculated from the model's parameter count; everything is sent in bfloat16",
    )


def show_answer(model: str, gpus: int, way: str, gpu: str) -> None:
    """Draw all ways to shard ``model``, one of ``LLAMA``, and list the cost of ``way``."""
    result = {name: answer(LLAMA[model], gpus, name) for name in WAYS}
    plots.held_by_cause(
        {name: each.held for name, each in result.items()},
        capacity_bytes=vgpu.PRESETS[gpu].memory_bytes,
        message=f"Llama {model} on {gpus} GPUs; dashed: one {gpu}",
        how="16 bytes per parameter, and two gathered blocks; no activations",
    )
    display(answer_table(result[way], gpus, gpu))


def sharding_explorer() -> ipywidgets.Widget:
    """Return controls for the model, GPUs and what's sharded, and ``show_answer``'s output."""
    controls = {
        "model": ipywidgets.Dropdown(options=list(LLAMA), value="70B", description="Llama"),
        "gpu": ipywidgets.Dropdown(
            options=list(vgpu.PRESETS), value="H100", description="GPU model"
        ),
        "gpus": steps("GPUs", [2**power for power in range(11)], 64),
        "way": ipywidgets.Dropdown(options=list(WAYS), value=WAYS[3], description="shard"),
    }
    few = {"gpu": ("H100", "H200"), "gpus": (8, 16, 64, 512)}
    return explorer(show_answer, controls, few, per_row=2)
