"""Arguments of PyTorch's operators that its exporter to ONNX leaves out, or reads otherwise, composed of others."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._decomp import get_decompositions

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


def _label_margins(x: torch.Tensor, target: torch.Tensor, reduction: int = 1) -> Any:
    """Of the labels before the first -1; PyTorch's own decomposition adds up those behind it too."""
    rows, labels = (each.reshape(-1, x.shape[-1]) for each in (x, target))
    listed = torch.cumsum((labels < 0).to(torch.int64), 1) == 0
    classes = torch.arange(x.shape[-1], device=x.device)
    own = ((labels.unsqueeze(2) == classes) & listed.unsqueeze(2)).any(1)
    apart = 1 - rows.gather(1, torch.where(listed, labels, 0)).unsqueeze(2) + rows.unsqueeze(1)
    counts = listed.unsqueeze(2) & ~own.unsqueeze(1)
    losses = torch.where(counts, apart.clamp(min=0), 0.0).sum((1, 2)) / x.shape[-1]
    if reduction:
        return losses.sum() if reduction == 2 else losses.mean()
    return losses.reshape(x.shape[:-1])


def _mean_of(pool: Callable[..., torch.Tensor], count: int) -> Callable[..., Any]:
    """A pool whose divisor is given: sums of windows, which reach as far as ``ceil_mode`` has them."""
    def pooled(
        x: torch.Tensor, kernel: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,),
        ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: int | None = None,
    ) -> Any:
        if divisor_override is None:
            return NotImplemented
        taps, before = ([*each] * (count // len(each)) for each in (kernel, padding))
        steps = [*stride] * (count // len(stride)) if stride else taps
        after = list(before)
        if ceil_mode:
            if not all(isinstance(size, int) for size in x.shape[-count:]):
                raise ValueError("what a pool with ceil_mode and a divisor of its own is over must have fixed sizes")
            for i, (size, k, step, pad) in enumerate(zip(x.shape[-count:], taps, steps, before, strict=True)):
                last = min(-(-(size + 2 * pad - k) // step), (size + pad - 1) // step)
                after[i] = max(pad, last * step + k - size - pad)
        around = [each for pair in zip(reversed(before), reversed(after), strict=True) for each in pair]
        padded = torch.nn.functional.pad(x, around) if any(around) else x
        return pool(padded, taps, steps) * (math.prod(taps) / divisor_override)

    return pooled


def _place_of_all(best: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Where the best of all elements is, with as many axes as these have."""
    def place(x: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
        return NotImplemented if dim is not None or not keepdim else best(x.reshape(-1), 0).reshape([1] * x.ndim)

    return place


def _taken_from(x: torch.Tensor, number: float, alpha: float = 1) -> torch.Tensor:
    """``number - alpha * x`` of integers, which the exporter cannot promote."""
    return x.to(torch.result_type(x, number)) * -alpha + number


def _promotes(node: fx.Node) -> bool:
    value = node.args[0].meta["val"]
    return not value.is_floating_point() and not value.is_complex() and not isinstance(node.args[1], int)


def _argument(place: int, name: str) -> Callable[[fx.Node], Any]:
    return lambda node: node.args[place] if len(node.args) > place else node.kwargs.get(name)


RULES: dict[Any, Callable[..., Any]] = {
    _ATEN.argmax.default: _place_of_all(torch.argmax),
    _ATEN.argmin.default: _place_of_all(torch.argmin),
    _ATEN.avg_pool2d.default: _mean_of(torch.nn.functional.avg_pool2d, 2),
    _ATEN.avg_pool3d.default: _mean_of(torch.nn.functional.avg_pool3d, 3),
    _ATEN.cross_entropy_loss.default: _cross_entropy,
    _ATEN.multilabel_margin_loss.default: _label_margins,
    _ATEN.rsub.Scalar: _taken_from,
    # by the statistics of the batch, for which the exporter takes the running ones where these are given
    **get_decompositions([_ATEN._native_batch_norm_legit_functional]),
}
#: of which uses; all, where nothing is said
USES: dict[Any, Callable[[fx.Node], Any]] = {
    _ATEN.argmax.default: _argument(2, "keepdim"),
    _ATEN.argmin.default: _argument(2, "keepdim"),
    _ATEN.avg_pool2d.default: _argument(6, "divisor_override"),
    _ATEN.avg_pool3d.default: _argument(6, "divisor_override"),
    _ATEN.batch_norm.default: _argument(5, "training"),
    _ATEN.cross_entropy_loss.default: _is_smooth,
    _ATEN.rsub.Scalar: _promotes,
}
