"""How well a matrix product fills a GPU: tiles, waves, and what is written at the end.

After NVIDIA, Matrix Multiplication Background User's Guide. A library cuts the result into tiles, one
for each block of threads. Tiles at the edges compute what nobody needs; the last wave of them lasts
as long as a full one. A tile is summed up first and written then, and its multiprocessor computes
nothing meanwhile: the longer the sums, the less that matters.

The library is taken to know the best tile. Smaller ones fill a GPU better, but read more for each
FLOP. Where there are too few tiles, each sum is split into parts (split-K), which are written as
float32 and added.

Left out: tiles of several waves at once on a multiprocessor, thread block clusters, blocks that
write one tile while they compute the next (CUTLASS's ping-pong kernels on Hopper), and sizes that
are no multiple of 16 bytes.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple


class Product(NamedTuple):
    """(batch, rows, inner) by (batch, inner, columns)."""

    batch: int
    rows: int
    inner: int
    columns: int
    written_bytes: int  # of the result


# Of cublasLtMatmulTile_t, both ways.
_SIDES = ((256, 128), (128, 128), (128, 64), (64, 64), (64, 32), (32, 32))
TILES = sorted({tile for sides in _SIDES for tile in (sides, sides[::-1])}, reverse=True)

# What the level-2 cache hands out feeds an A100's tensor cores from 43 FLOPs a byte on, a V100's from
# 40 (312 and 125 TFLOP/s; 7.2 and 3.1 TB/s, which is 5120 and 2048 bytes a clock: NVIDIA A100
# whitepaper). It is taken for other GPUs too; float32 units need a tenth of it.
_FLOP_PER_BYTE = 43

_STEP = 64  # the least part of a sum: what kernels of 16 bits go along it at once


def seconds(
    product: Product,
    arithmetic_s: float,
    read_s: float,
    bytes_per_s: float,
    multi_processors: int,
    on_tensor_cores: bool,
) -> float:
    """The least that it takes, of all tiles. There is something to sum.

    arithmetic_s: with all multiprocessors busy from begin to end. read_s: what is read, from memory.
    """
    batch, rows, inner, columns, written_bytes = product
    elements = batch * rows * columns
    element_s = arithmetic_s * multi_processors / elements  # on one of them

    def all_times() -> Iterator[float]:
        for height, width in TILES:
            height, width = min(height, rows), min(width, columns)
            tiles = batch * math.ceil(rows / height) * math.ceil(columns / width)
            speed = min(1.0, height * width / (height + width) / _FLOP_PER_BYTE)
            tile_s = height * width * element_s / (speed if on_tensor_cores else 1.0)
            for parts in {1, min(multi_processors // tiles, inner // _STEP)} - {0}:
                waves = math.ceil(tiles * parts / multi_processors)
                added_bytes = 0 if parts == 1 else 2 * 4 * parts * elements
                busy_s = max(waves * tile_s / parts, read_s)
                yield busy_s + (written_bytes + added_bytes) / bytes_per_s

    return min(all_times())
