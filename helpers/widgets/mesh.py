"""Explorer for meshes of 64 GPUs: groups, bytes on links and time, by dimension sizes and order.

The model is Llama 70B with sequences of 8192 tokens, trained on H100s, eight per host. The
estimates come from ``vgpu.plan.estimate``.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

import ipywidgets
from IPython.display import display

import vgpu
from helpers import plots
from helpers.widgets.live import explorer, steps
from vgpu.plan import estimate
from vgpu.plan.estimate import DIMENSIONS, MeshStep
from vgpu.plan.layout import groups
from vgpu.plan.transformer import LLAMA
from vgpu.tables import Table
from vgpu.units import format_bytes, format_seconds

GPUS, GPUS_PER_HOST, GPU = 64, 8, "H100"
MODEL = replace(LLAMA["70B"], sequence=8192)
NETWORKS = ("InfiniBand NDR", "InfiniBand HDR", "EFA p5", "Ethernet 100")


def mesh_sizes(
    tensor: int, context: int, pipeline: int, order: Sequence[str] = DIMENSIONS
) -> dict[str, int]:
    """Return the sizes of all dimensions; ``data`` follows from the number of GPUs.

    They're in ``order``, innermost first. Raises ValueError if the sizes don't divide that number.
    """
    others = tensor * context * pipeline
    if GPUS % others:
        raise ValueError(
            f"{tensor} × {context} × {pipeline} = {others} does not divide {GPUS} GPUs"
        )
    sizes = dict(zip(DIMENSIONS, (tensor, context, pipeline, GPUS // others), strict=True))
    return {name: sizes[name] for name in order}


def answer(
    sizes: dict[str, int],
    sequences: int = 64,
    network: str = "InfiniBand NDR",
    gpus_per_host: int = GPUS_PER_HOST,
    **shares: float,
) -> MeshStep:
    """Estimate a step of Llama 70B on the mesh.

    ``shares`` are efficiencies, passed to ``CostModel``. Raises ValueError for sizes that don't
    divide the model evenly.
    """
    cost = vgpu.CostModel(
        vgpu.PRESETS[GPU],
        network=vgpu.NETWORKS[network],
        gpus_per_host=gpus_per_host,
        **shares,  # type: ignore[arg-type]
    )
    return estimate.mesh_step(sizes, MODEL, sequences, cost)


def tokens_per_s(step: MeshStep, sequences: int) -> float:
    """Return the tokens/s per GPU."""
    return sequences * MODEL.sequence / step.seconds / GPUS


def answer_table(step: MeshStep, sequences: int) -> Table:
    """Return a table of dimensions: group, link, bytes and time; the caption sums up the step."""
    rows: list[tuple[object, ...]] = []
    for each in step.traffic:
        talks = ", ".join(map(str, each.ranks[:4])) + (", …" if len(each.ranks) > 4 else "")
        rows.append(
            (
                each.dimension,
                talks,
                each.link,
                format_bytes(each.sent_bytes),
                format_seconds(each.sending_s),
                format_seconds(each.exposed_s),
            )
        )
    room = vgpu.PRESETS[GPU].memory_bytes
    fits = "fits" if step.held_bytes < room else "does not fit"
    caption = (
        f"One step, predicted: {format_seconds(step.seconds)}, of which "
        f"{format_seconds(step.compute_s)} is computation and {format_seconds(step.bubble_s)} is "
        f"the pipeline bubble; {tokens_per_s(step, sequences):.0f} tokens/s per GPU. Parameters, "
        f"gradients and optimizer state: {format_bytes(step.held_bytes)} of "
        f"{format_bytes(room)}: {fits}."
    )
    header = ("dimension", "GPU 0 talks to", "link", "a GPU sends", "sending", "exposed")
    return Table(header, rows, caption=caption)


def show_mesh(
    tensor: int,
    context: int,
    pipeline: int,
    order: Sequence[str] = DIMENSIONS,
    sequences: int = 64,
    network: str = "InfiniBand NDR",
) -> None:
    """Draw the groups and list what they send, or say why the mesh is impossible."""
    try:
        sizes = mesh_sizes(tensor, context, pipeline, order)
        step = answer(sizes, sequences, network)
    except ValueError as problem:
        print(f"No such mesh: {problem}.")
        return
    several = {name: groups(sizes, name) for name, size in sizes.items() if size > 1}
    if several:
        plots.mesh(several, GPUS_PER_HOST)
    display(answer_table(step, sequences))


def mesh_explorer() -> ipywidgets.Widget:
    """Return controls for sizes, order, batch and network, together with ``show_mesh``'s output."""
    orders = [(", ".join(order), order) for order in permutations(DIMENSIONS)]
    wide = {"style": {"description_width": "initial"}}
    controls = {
        "tensor": steps("tensor", [1, 2, 4, 8], 8),
        "context": steps("context", [1, 2, 4, 8], 1),
        "pipeline": steps("pipeline", [1, 2, 4, 8], 1),
        "order": ipywidgets.Dropdown(options=orders, description="innermost first", **wide),
        "sequences": steps("sequences", [16, 32, 64, 128, 256], 64),
        "network": ipywidgets.Dropdown(options=NETWORKS, description="network"),
    }
    data_first = ("data", *(name for name in DIMENSIONS if name != "data"))
    few = {
        **{"tensor": (1, 4, 8), "context": (1, 2, 8), "pipeline": (1, 2, 8)},
        **{"order": (DIMENSIONS, data_first), "sequences": (16, 64), "network": NETWORKS[:1]},
    }
    return explorer(show_mesh, controls, few)
