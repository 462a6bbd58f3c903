"""Operators of PyTorch that its exporter to ONNX lacks or translates wrongly, composed of others."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from mlc.errors import ModelError
from mlc.frontend import torch_options

__all__ = ["composed"]

_ATEN = torch.ops.aten


def composed(program: Any, name: str) -> Any:
    """The program as it is where it has no such operators; else another one with the same weights."""
    targets = {node.target for module in program.graph_module.modules() if isinstance(module, fx.GraphModule)
               for node in module.graph.nodes if _is_wanted(node)}
    if not targets:
        return program
    wanted = {_IN_PLACE.get(target, target) for target in targets} | _INNER
    table = {target: rule for target, rule in _RULES.items() if target in wanted}
    try:
        with torch.no_grad():
            return program.run_decompositions(table)
    except Exception as error:  # a shape that data decides, say
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"PyTorch must be able to take {name} apart, but: {reason}") from error


def _is_wanted(node: fx.Node) -> bool:
    test = _USES.get(node.target)
    return _IN_PLACE.get(node.target, node.target) in _RULES and (test is None or bool(test(node)))


def _is_fixed(*sizes: Any) -> bool:
    return all(isinstance(size, int) for size in sizes)


# pools whose windows are of several sizes

def _windows(x: torch.Tensor, axis: int, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The elements of each window along an axis, ``[parts, widest]``, the last one again where it is narrower; and
    which of them are its own."""
    size = x.shape[axis]
    widest = max(-(-(i + 1) * size // parts) - i * size // parts for i in range(parts))
    part = torch.arange(parts, device=x.device)
    end = -torch.div(-(part + 1) * size, parts, rounding_mode="floor")
    place = torch.div(part * size, parts, rounding_mode="floor")[:, None] + torch.arange(widest, device=x.device)
    return torch.minimum(place, end[:, None] - 1), place < end[:, None]


def _adaptive_max(x: torch.Tensor, output_size: Sequence[int]) -> Any:
    count = len(output_size)
    sizes, lead = x.shape[-count:], list(x.shape[:-count])
    if not _is_fixed(*sizes, *output_size):
        return NotImplemented
    if not any(size % parts for size, parts in zip(sizes, output_size, strict=True)):
        return _max_pool(x, [size // parts for size, parts in zip(sizes, output_size, strict=True)])
    at = torch.zeros((1,) * (2 * count), dtype=torch.int64, device=x.device)
    for axis, (size, parts) in enumerate(zip(sizes, output_size, strict=True)):
        own = len(lead) + 2 * axis
        place, _ = _windows(x, own, parts)
        x = x.index_select(own, place.reshape(-1)).unflatten(own, place.shape)
        at = at * size + place.reshape(*[1] * 2 * axis, *place.shape, *[1] * 2 * (count - axis - 1))
    order = [*range(0, 2 * count, 2), *range(1, 2 * count, 2)]
    x = x.permute([*range(len(lead)), *(len(lead) + i for i in order)]).flatten(-count)
    at = at.permute(order).flatten(-count)
    best = x.argmax(-1, keepdim=True)
    return x.amax(-1), at.expand(x.shape).gather(-1, best).squeeze(-1)


def _max_pool(x: torch.Tensor, windows: list[int]) -> Any:
    if len(windows) == 1:
        best, places = _ATEN.max_pool2d_with_indices(x.unsqueeze(-2), [1, *windows], [1, *windows])
        return best.squeeze(-2), places.squeeze(-2)
    pool = _ATEN.max_pool2d_with_indices if len(windows) == 2 else _ATEN.max_pool3d_with_indices
    return pool(x, windows, windows)


def _adaptive_mean(x: torch.Tensor, output_size: Sequence[int]) -> Any:
    count = len(output_size)
    if not _is_fixed(*x.shape[-count:], *output_size):
        return NotImplemented
    for axis, parts in zip(range(x.ndim - count, x.ndim), output_size, strict=True):
        if x.shape[axis] % parts == 0:
            x = x.unflatten(axis, (parts, x.shape[axis] // parts)).mean(axis + 1)
            continue
        place, own = _windows(x, axis, parts)
        taken = x.index_select(axis, place.reshape(-1)).unflatten(axis, place.shape)
        behind = [1] * (x.ndim - axis - 1)
        total = torch.where(own.reshape(*own.shape, *behind), taken, 0.0).sum(axis + 1)
        x = total / own.sum(1).to(x.dtype).reshape(-1, *behind)
    return x


# elements at places that other tensors say

def _put(x: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor, accumulate: bool = False
         ) -> Any:
    """At the places of one mask."""
    masks = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    if len(masks) != 1 or masks[0][1].dtype not in (torch.bool, torch.uint8):
        return NotImplemented
    axis, mask = masks[0]
    behind = x.ndim - axis - mask.ndim
    wide = mask.bool().reshape(*mask.shape, *[1] * behind)
    if values.ndim > behind and any(size != 1 for size in values.shape[:values.ndim - behind]):
        # as many rows as the mask has places
        if axis or values.ndim != behind + 1 or not _is_fixed(*values.shape, *mask.shape):
            return NotImplemented
        values = _in_turn(mask.bool(), values.expand(len(values), *x.shape[mask.ndim:]))
    elif values.ndim > behind:
        values = values.reshape(values.shape[values.ndim - behind:])
    return torch.where(wide, x + values if accumulate else values.to(x.dtype), x)


def _in_turn(mask: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """For each element of a mask that is set the next one of ``rows``; for the others, any."""
    place = torch.cumsum(mask.reshape(-1).to(torch.int64), 0) - 1
    return rows[place.clamp(0, len(rows) - 1)].unflatten(0, mask.shape)


def _masked_scatter(x: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> Any:
    x, mask = torch.broadcast_tensors(x, mask)
    shared = 0  # axes at the end along which the mask is the same
    while shared < mask.ndim and (mask.stride(-shared - 1) == 0 or mask.shape[-shared - 1] == 1):
        shared += 1
    width = math.prod(x.shape[x.ndim - shared:])
    if not _is_fixed(*x.shape, *source.shape):
        return NotImplemented
    if not source.numel() or source.numel() % width:
        shared, width = 0, 1
    rows = mask
    for _ in range(shared):
        rows = rows.select(-1, 0)
    taken = _in_turn(rows.reshape(-1), source.reshape(-1, width)).reshape(x.shape)
    return torch.where(mask, taken.to(x.dtype), x)


def _scatter_mean(
    x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, reduce: str, include_self: bool = True
) -> Any:
    if reduce != "mean":
        return NotImplemented
    count = torch.zeros_like(x).scatter_add(dim, index, torch.ones_like(source))
    total = (x if include_self else torch.where(count > 0, torch.zeros_like(x), x)).scatter_add(dim, index, source)
    count = count + 1 if include_self else count.clamp(min=1)
    return torch.div(total, count, rounding_mode=None if x.is_floating_point() else "floor")


def _index_reduce(
    x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, reduce: str, include_self: bool = True
) -> Any:
    wide = index.reshape([-1 if axis == dim % x.ndim else 1 for axis in range(x.ndim)]).expand(source.shape)
    return torch.scatter_reduce(x, dim, wide, source, reduce, include_self=include_self)


def _embedding_bag(
    weight: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, scale_grad_by_freq: bool = False, mode: int = 0,
    sparse: bool = False, per_sample_weights: torch.Tensor | None = None, include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    if include_last_offset:
        offsets = offsets[:-1]
    rows = torch.nn.functional.embedding(indices, weight)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None]
    owner = (offsets <= torch.arange(len(indices), device=indices.device)[:, None]).sum(1) - 1
    kept = torch.ones_like(indices, dtype=weight.dtype)
    if padding_idx is not None and padding_idx != -1:
        kept = (indices != padding_idx % len(weight)).to(weight.dtype)
    count = kept.new_zeros(len(offsets)).index_add(0, owner, kept)
    if mode == 2:  # 0 is the sum, 1 the mean, 2 the largest
        lowest = weight.new_full((len(offsets), weight.shape[1]), -math.inf)
        rows = torch.where(kept[:, None] > 0, rows, -math.inf)
        most = lowest.scatter_reduce(0, owner[:, None].expand(rows.shape), rows, "amax")
        made = torch.where(count[:, None] > 0, most, 0.0)
    else:
        made = weight.new_zeros(len(offsets), weight.shape[1]).index_add(0, owner, rows * kept[:, None])
        made = made / count.clamp(min=1)[:, None] if mode == 1 else made
    return made, owner, count.to(torch.int64), torch.zeros_like(offsets)  # only the first is the layer's


# order

def _kth(x: torch.Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    if not x.ndim:
        return x, torch.zeros_like(x, dtype=torch.int64)
    found = tuple(each.narrow(dim, k - 1, 1) for each in torch.sort(x, dim))
    return found if keepdim else tuple(each.squeeze(dim) for each in found)


def _median(x: torch.Tensor, dim: int, keepdim: bool = False) -> Any:
    """The lower one of two in the middle; NaN if there is one."""
    values, places = _kth(x, (x.shape[dim] + 1) // 2, dim, keepdim)
    if x.is_floating_point():
        values = torch.where(x.isnan().any(dim, keepdim), math.nan, values)
    return values, places


def _nanmedian(x: torch.Tensor, dim: int, keepdim: bool = False) -> Any:
    if not x.is_floating_point():
        return _median(x, dim, keepdim)
    # ONNX does not say where NaN is among the sorted
    values, places = torch.sort(torch.where(x.isnan(), math.inf, x), dim)
    count = (~x.isnan()).sum(dim, True)
    middle = torch.div(count - 1, 2, rounding_mode="floor").clamp(min=0)
    found = torch.where(count > 0, values.gather(dim, middle), math.nan), places.gather(dim, middle)
    return found if keepdim else tuple(each.squeeze(dim) for each in found)


def _best_so_far(better: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """The best of all elements up to each, and where it is: the last of several. In as many steps as the logarithm of
    their number, each of which looks twice as far back."""
    def scan(x: torch.Tensor, dim: int) -> Any:
        size = x.shape[dim] if x.ndim else 1
        if not _is_fixed(size):
            return NotImplemented
        shape = [-1 if axis == dim % x.ndim else 1 for axis in range(x.ndim)]
        places = torch.arange(size, device=x.device).reshape(shape).expand(x.shape)
        step = 1
        while step < size:
            (former, own), (place, own_place) = ((each.narrow(dim, 0, size - step), each.narrow(dim, step, size - step))
                                                 for each in (x, places))
            kept = better(own, former) | own.isnan() if x.is_floating_point() else better(own, former)
            x = torch.cat([x.narrow(dim, 0, step), torch.where(kept, own, former)], dim)
            places = torch.cat([places.narrow(dim, 0, step), torch.where(kept, own_place, place)], dim)
            step *= 2
        return x, places

    return scan


def _searched(
    ordered: torch.Tensor, values: torch.Tensor, *, out_int32: bool = False, right: bool = False,
    side: str | None = None, sorter: torch.Tensor | None = None,
) -> Any:
    """How many of a row are less than a value, or no larger."""
    ordered = ordered if sorter is None else ordered.gather(-1, sorter)
    rows, wide = ordered.unsqueeze(-2) if ordered.ndim > 1 else ordered, values.unsqueeze(-1)
    before = rows <= wide if right or side == "right" else rows < wide
    return before.sum(-1).to(torch.int32 if out_int32 else torch.int64)


# arithmetic

def _distances(a: torch.Tensor, b: torch.Tensor, p: float = 2.0, compute_mode: int | None = None) -> Any:
    by_product = p == 2 and compute_mode != 2 and (compute_mode == 1 or max(a.shape[-2], b.shape[-2]) > 25)
    if by_product:
        squares = a.square().sum(-1, keepdim=True) + b.square().sum(-1).unsqueeze(-2)
        return (squares - 2 * (a @ b.mT)).clamp(min=0).sqrt()
    apart = (a.unsqueeze(-2) - b.unsqueeze(-3)).abs()
    if p == 0:
        return (apart != 0).sum(-1).to(a.dtype)
    if p == math.inf:
        return apart.amax(-1)
    if p == 2:
        return apart.square().sum(-1).sqrt()
    return apart.sum(-1) if p == 1 else apart.pow(p).sum(-1).pow(1 / p)


def _rrelu(
    x: torch.Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, generator: Any = None
) -> Any:
    return NotImplemented if training else torch.nn.functional.leaky_relu(x, (lower + upper) / 2)


def _of_all(best: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Without axes, of all elements."""
    def taken(x: torch.Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
        return NotImplemented if dim else best(x.reshape(-1)).reshape([1] * x.ndim if keepdim else [])

    return taken


def _least_and_largest(x: torch.Tensor, *, dim: int | None = None, keepdim: bool = False) -> Any:
    """Of all elements or along an axis."""
    if dim is None:
        return tuple(_of_all(best)(x, (), keepdim) for best in (torch.min, torch.max))
    return x.amin(dim, keepdim), x.amax(dim, keepdim)


def _number_of(best: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The one of two that is a number."""
    def taken(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.where(a.isnan(), b, torch.where(b.isnan(), a, best(a, b)))

    return taken


def _with_sign(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The sign of 0 is seen in its reciprocal."""
    return torch.where((b < 0) | (b.reciprocal() < 0), -a.abs(), a.abs())


def _has_mask(node: fx.Node) -> bool:
    return any(isinstance(index, fx.Node) and index.meta["val"].dtype in (torch.bool, torch.uint8)
               for index in node.args[1] if index is not None)


def _has_no_axes(node: fx.Node) -> bool:
    return not (node.args[1] if len(node.args) > 1 else node.kwargs.get("dim"))


#: operators --> how they are composed; which returns NotImplemented where it does not know
_RULES: dict[Any, Callable[..., Any]] = {
    # of checks of the inputs, which the exporter leaves out
    _ATEN._is_all_true.default: torch.all,
    _ATEN._is_any_true.default: torch.any,
    **dict.fromkeys([_ATEN.adaptive_max_pool1d.default, _ATEN.adaptive_max_pool2d.default,
                     _ATEN.adaptive_max_pool3d.default], _adaptive_max),
    _ATEN.adaptive_avg_pool3d.default: _adaptive_mean,
    _ATEN.amax.default: _of_all(torch.max),
    _ATEN.amin.default: _of_all(torch.min),
    _ATEN.aminmax.default: _least_and_largest,
    _ATEN.cdist.default: _distances,
    _ATEN.copysign.Tensor: _with_sign,
    _ATEN.cummax.default: _best_so_far(torch.ge),
    _ATEN.cummin.default: _best_so_far(torch.le),
    **dict.fromkeys([_ATEN.embedding_bag.default, _ATEN.embedding_bag.padding_idx], _embedding_bag),
    _ATEN.fmax.default: _number_of(torch.maximum),
    _ATEN.fmin.default: _number_of(torch.minimum),
    _ATEN.hypot.default: lambda a, b: (a.square() + b.square()).sqrt(),
    _ATEN.index_put.default: _put,
    _ATEN.index_reduce.default: _index_reduce,
    _ATEN.kthvalue.default: _kth,
    _ATEN.masked_scatter.default: _masked_scatter,
    _ATEN.median.default: lambda x: _median(x.reshape(-1), 0)[0],
    _ATEN.median.dim: _median,
    _ATEN.nanmedian.default: lambda x: _nanmedian(x.reshape(-1), 0)[0],
    _ATEN.nanmedian.dim: _nanmedian,
    _ATEN.rrelu.default: _rrelu,
    _ATEN.scatter_reduce.two: _scatter_mean,
    _ATEN.searchsorted.Tensor: _searched,
    **torch_options.RULES,
}
#: those that work in place --> what does not
_IN_PLACE = {
    _ATEN.batch_norm.default: _ATEN._native_batch_norm_legit_functional.default,
    _ATEN.index_put_.default: _ATEN.index_put.default, _ATEN.index_reduce_.default: _ATEN.index_reduce.default,
    _ATEN.masked_scatter_.default: _ATEN.masked_scatter.default, _ATEN.scatter_reduce_.two: _ATEN.scatter_reduce.two,
}
#: what the composition of another one may call
_INNER = {_ATEN.scatter_reduce.two}
#: operators of which the exporter has other uses right --> whether this one is composed
_USES: dict[Any, Callable[[fx.Node], Any]] = {
    _ATEN.index_put.default: _has_mask, _ATEN.index_put_.default: _has_mask, _ATEN.amax.default: _has_no_axes,
    _ATEN.amin.default: _has_no_axes, _ATEN.scatter_reduce.two: lambda node: "mean" in node.args,
    _ATEN.scatter_reduce_.two: lambda node: "mean" in node.args, **torch_options.USES,
}
