"""Explorer for serving: a model on some GPUs, whether it fits, and how fast it answers."""

import ipywidgets
from IPython.display import display

from helpers import plots
from helpers.widgets.live import explorer, steps
from vgpu.plan.serving import Server
from vgpu.plan.transformer import LLAMA
from vgpu.tables import Table
from vgpu.units import format_bytes, format_seconds

GPUS, COUNTS, CONTEXTS = ("H100", "H200", "B200"), (1, 2, 4, 8, 16), (1024, 8192, 65_536)
NUMBERS = {"bfloat16": 16, "float8": 8}


def server_of(model: str, gpu: str, count: int, numbers: str) -> Server:
    """Return a server, tensor-parallel within a host of eight GPUs; 16 form two stages."""
    bits, stages = NUMBERS[numbers], max(1, count // 8)
    server = Server(LLAMA[model], min(count, 8), stages, weight_bits=bits, cache_bits=bits)
    return server.with_costs(gpu=gpu)


def batches_of(server: Server, context: int) -> list[tuple[int, float, float]]:
    """Return (batch size, seconds per token, total tokens/s) for batch sizes that fit."""
    most = server.most_sequences(context)
    batches = [2**k for k in range(12) if server.pp <= 2**k < most] + [most] * (most > 0)
    waits_s = [server.decode_s(batch, context) for batch in batches]
    return [(n, wait_s, n / wait_s) for n, wait_s in zip(batches, waits_s, strict=True)]


def server_table(server: Server, context: int) -> Table:
    """Return a table of bytes, sequences that fit in the cache, and prompt and token times."""
    rows = [
        ("weights per GPU", format_bytes(server.weight_bytes)),
        ("cache per token, per GPU", format_bytes(server.cache_bytes_per_token)),
        (f"sequences of {context:,} tokens", f"{server.most_sequences(context):,} fit"),
    ]
    if server.most_sequences(context):
        rows += [
            ("first token for a prompt that long", format_seconds(server.prefill_s(context))),
            ("one user's next token", format_seconds(server.decode_s(1, context))),
        ]
    return Table(
        (f"tp {server.tp}, {server.pp} stages" if server.pp > 1 else f"tp {server.tp}", ""),
        rows,
        caption="bytes are counted; times are virtual",
    )


def show_server(model: str, gpu: str, count: int, numbers: str, context: int) -> None:
    """Draw tokens/s against time per token, or say that nothing fits; then show a table."""
    server = server_of(model, gpu, count, numbers)
    place = f"{count} {gpu}{'s' if count > 1 else ''}"
    if points := batches_of(server, context):
        plots.latency_and_throughput(
            {f"{context:,} tokens": points},
            f"Llama {model} in {numbers} on {place}",
            "virtual time, decoding only; numbers: batch size",
        )
    else:
        print(f"Llama {model} in {numbers} leaves no room for {context:,} tokens on {place}.")
    display(server_table(server, context))


def serving_explorer() -> ipywidgets.Widget:
    """Return controls for ``show_server``'s arguments, together with its output."""
    return explorer(
        show_server,
        {
            "model": ipywidgets.Dropdown(options=list(LLAMA), value="70B", description="Llama"),
            "gpu": ipywidgets.Dropdown(options=GPUS, description="GPU"),
            "count": steps("GPUs", COUNTS, 4),
            "numbers": ipywidgets.Dropdown(options=list(NUMBERS), description="format"),
            "context": steps("tokens of context", CONTEXTS, 8192),
        },
        few={"gpu": ("H100",)},
    )
