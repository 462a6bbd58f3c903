"""Dynamic sizes of Dynamo: where they occur in a graph's inputs, and which ranges one artifact serves."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mlc.errors import ModelError
from mlc.frontend.pytorch import input_shapes, is_symbolic
from mlc.shapes import DEFAULT_RANGE, Free, Linear, Range

__all__ = ["Symbols", "computed", "is_symbol", "numbers", "places", "ranges_of", "sized", "symbols_of"]

#: for the arguments of a graph with sizes that Dynamo left free: a tensor's shape, or the size that is an argument
Symbols = Mapping[int, Any]

_ANY = 2**31 - 1  # any size: it follows from others


def symbols_of(graph: torch.fx.GraphModule) -> dict[int, Any]:
    """Empty where all sizes are fixed."""
    values = [node.meta.get("val") for node in graph.graph.nodes if node.op == "placeholder"]
    found = {i: tuple(v.shape) if isinstance(v, torch.Tensor) else v for i, v in enumerate(values)}
    return found if any(is_symbol(v) or (isinstance(v, tuple) and is_symbolic(v)) for v in found.values()) else {}


def is_symbol(value: Any) -> bool:
    return isinstance(value, torch.SymInt | torch.SymFloat)


def places(symbols: Symbols, inputs: Sequence[int]) -> dict[int, tuple[int, int]]:
    """The position of each size that is an argument among the shapes of the ``inputs``: by argument and axis."""
    known = {str(size): (i, axis) for i in inputs for axis, size in enumerate(symbols.get(i, ())) if is_symbol(size)}
    sizes = {i: str(value) for i, value in symbols.items() if is_symbol(value)}
    return {i: known[text] for i, text in sizes.items() if text in known}


def numbers(symbols: Symbols, inputs: Sequence[int]) -> list[int]:
    """The arguments that are free numbers and no sizes of the ``inputs``: how far a text has come, say."""
    sizes = places(symbols, inputs)
    return [i for i, value in symbols.items() if is_symbol(value) and i not in sizes]


def computed(graph: torch.fx.GraphModule, free: Sequence[int]) -> Any:
    """The first operator by which the graph computes a number of the arguments ``free`` that ONNX's operators do not
    compute as Python does: these divide towards 0, and in float32. None where there is no such operator."""
    known = {node for i, node in enumerate(graph.graph.find_nodes(op="placeholder")) if i in free}
    for node in graph.graph.nodes:
        number = isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)
        if number and not known.isdisjoint(node.all_input_nodes):
            if node.target not in _EXACT:
                return node.target
            known.add(node)
    return None


#: of numbers as of tensors
_EXACT = (operator.add, operator.sub, operator.mul, operator.neg)


def _free_range(size: Any, now: int) -> Range:
    """The sizes that an artifact serves where Dynamo left one free, which is ``now`` that large: as far as it was said
    (``torch._dynamo.mark_dynamic(..., min=, max=)``), and to the default's end or twice as far as it has come."""
    said = size.node.shape_env.bound_sympy(size.node.expr)
    high = max(DEFAULT_RANGE.high, 1 << now.bit_length())
    low = int(said.lower) if getattr(said.lower, "is_Integer", False) else 1
    end = int(said.upper) if getattr(said.upper, "is_Integer", False) else high
    return Range(max(1, min(low, now)) if low > 2 else 1, max(now, min(high, end)))


def ranges_of(program: Any, given: Sequence[tuple[torch.Tensor, Mapping[int, Any]]]) -> dict[str, list[Any]]:
    """The ranges of a program's inputs that have free sizes: where Dynamo left some free and export has kept that."""
    found: dict[str, list[Any]] = {}
    for (name, exported), (tensor, axes) in zip(input_shapes(program).items(), given, strict=True):
        if is_symbolic(exported):
            found[name] = [
                int(now) if not is_symbolic([size]) else _free_range(axes[axis], int(now)) if axis in axes
                and str(size).isidentifier() else Range(0, _ANY)
                for axis, (size, now) in enumerate(zip(exported, tensor.shape, strict=True))
            ]
    if not found:
        raise ModelError("some size must be free, but torch.export needs all to be numbers")
    return found


def sized(size: int | Free, sizes: Mapping[str, int], now: int) -> int:
    """An output's size by those of the inputs, ``now`` where that cannot be told."""
    if not isinstance(size, Free) or size.name in sizes:
        return sizes[size.name] if isinstance(size, Free) else size
    linear = Linear.parse(size.name)
    known = linear is not None and all(name in sizes for name, _ in linear.terms)
    return linear.of(sizes) if linear is not None and known else now
