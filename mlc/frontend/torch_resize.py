"""Images that PyTorch resizes with antialiasing by a scale of its own, or corner to corner, for which ONNX's operator
has no words: products with the weights that PyTorch itself gives to each pixel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["resize_translations"]


def resize_translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """For ``torch.onnx.export(custom_translation_table=...)``; a free size raises ``ValueError``."""
    from onnxscript.function_libs.torch_lib.ops import nn

    names = ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")
    packets = {name: getattr(torch.ops.aten, name) for name in names}
    return {packet.default: _resized(packet, getattr(nn, f"aten_{name}")) for name, packet in packets.items()}


def _resized(function: Callable[..., torch.Tensor], by_operator: Callable[..., Any]) -> Callable[..., Any]:
    def translated(x: Any, output_size: Any, align_corners: bool, scales_h: float | None = None,
                   scales_w: float | None = None) -> Any:
        from onnxscript import ir, opset18

        sizes, scales = list(x.shape[2:]), (scales_h, scales_w)
        if not align_corners and all(map(_is_ratio, sizes, scales)):
            return by_operator(x, output_size, align_corners)
        if not all(isinstance(size, int) for size in (*sizes, *output_size)):
            raise ValueError("what is resized by a scale with antialiasing must have fixed sizes")
        op: Any = opset18
        rows, columns = (
            op.CastLike(op.Constant(value=ir.tensor(_weights(function, size, made, align_corners, scale))), x)
            for size, made, scale in zip(sizes, output_size, scales, strict=True))
        return op.MatMul(op.MatMul(op.Transpose(rows, perm=[1, 0]), x), columns)

    return translated


def _is_ratio(size: Any, scale: float | None) -> bool:
    """Whether a scale is that of the sizes."""
    return scale is None or float(scale).is_integer() or (isinstance(size, int) and (size * scale).is_integer())


def _weights(function: Callable[..., torch.Tensor], size: int, made: int, align_corners: bool, scale: float | None
             ) -> Any:
    """``[size, made]``: of each pixel of a row in each pixel that is made of it."""
    each = torch.eye(size, dtype=torch.float64)[None, None]  # PyTorch errs in images that are one pixel wide
    return function(each, [size, made], align_corners, None, scale)[0, 0].numpy()
