"""Arguments of PyTorch's operators that its exporter to ONNX leaves out, or reads otherwise, composed of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

__all__ = ["RULES", "USES"]

_ATEN = torch.ops.aten


def _cross_entropy(
    x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None, reduction: int = 1,
    ignore_index: int = -100, label_smoothing: float = 0.0,
) -> Any:
    """Of classes that are smoothed, or that each have a probability: as PyTorch's ``LossNLL.cpp`` has it."""
    axis = min(1, x.ndim - 1)
    classes, logs = x.shape[axis], torch.log_softmax(x, axis)
    weighted = logs if weight is None else logs * weight.reshape([-1 if i == axis else 1 for i in range(x.ndim)])
    if target.is_floating_point():
        losses = -(weighted * (target * (1 - label_smoothing) + label_smoothing / classes)).sum(axis)
        return losses if reduction == 0 else losses.sum() if reduction == 2 else losses.mean()
    ignored = target == ignore_index
    even = torch.where(ignored, 0.0, -weighted.sum(axis))
    if reduction:
        even = even.sum()
    if reduction == 1:
        kept = torch.ones_like(target, dtype=x.dtype) if weight is None else weight[torch.where(ignored, 0, target)]
        even = even / torch.where(ignored, 0.0, kept).sum()
    own = _ATEN.nll_loss_nd(logs, target, weight, reduction, ignore_index)
    return (1 - label_smoothing) * own + label_smoothing / classes * even


def _is_smooth(node: fx.Node) -> bool:
    smoothing = node.args[5] if len(node.args) > 5 else node.kwargs.get("label_smoothing", 0.0)
    return bool(smoothing) or node.args[1].meta["val"].is_floating_point()


RULES: dict[Any, Callable[..., Any]] = {
    _ATEN.cross_entropy_loss.default: _cross_entropy,
}
USES: dict[Any, Callable[[fx.Node], bool]] = {
    _ATEN.cross_entropy_loss.default: _is_smooth,
}
