"""``shapes_only()``: models of any size without arithmetic and without memory of their own."""

from vgpu.tensor.shapes.block import install, shapes_only
from vgpu.tensor.shapes.shape import NoValueError, is_shape

__all__ = ["NoValueError", "install", "is_shape", "shapes_only"]
