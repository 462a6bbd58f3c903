"""Windows of signals, as the numbers that PyTorch makes of them: ONNX has few, and some of other coefficients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["window_translations"]

_WINDOWS = (torch.bartlett_window, torch.blackman_window, torch.hamming_window, torch.hann_window, torch.kaiser_window)


def window_translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """For ``torch.onnx.export(custom_translation_table=...)``; a free size raises ``ValueError``."""
    packets = {window: getattr(torch.ops.aten, window.__name__) for window in _WINDOWS}
    return {getattr(packet, overload): _constant(window) for window, packet in packets.items()
            for overload in packet.overloads() if not overload.endswith("out")}


def _constant(window: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def translated(window_length: Any, *shape: Any, dtype: int | None = None, **_: Any) -> Any:
        from onnxscript import ir, opset18

        if not isinstance(window_length, int):
            raise ValueError(f"the size of a window must be fixed ({window.__name__})")
        kind = ir.DataType.FLOAT if dtype is None else ir.DataType(dtype)
        numbers = window(window_length, *shape, dtype=_TYPES[kind.name])
        op: Any = opset18
        return op.Cast(op.Constant(value=ir.tensor(numbers.double().numpy())), to=kind.value)

    return translated


_TYPES = {"FLOAT": torch.float32, "DOUBLE": torch.float64, "FLOAT16": torch.float16, "BFLOAT16": torch.bfloat16}
