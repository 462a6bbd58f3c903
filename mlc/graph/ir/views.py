"""Views: tensors as index expressions into what they are slices, reshapes, transposes and multiples of."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import tvm
from tvm import relax, sym, te, tirx

from mlc.graph.ir.constants import scalar_of
from mlc.graph.ir.movement import cuts, permutation
from mlc.graph.ir.rewrite import bindings, dtype_of, leaves, op_name, shape_of
from mlc.sizes import Size
from schedules.analysis import replaced, uses, walk

__all__ = ["Graph", "View", "i64"]

_MOVEMENT = ("permute_dims", "reshape", "strided_slice", "broadcast_to")
_SCALING = ("multiply", "divide")


def i64(value: int) -> tirx.Expr:
    """A size, of the type that Relax has its shapes in."""
    return value.expr if isinstance(value, Size) else tirx.const(value, "int64")


@dataclass(frozen=True)
class View:
    """A tensor as ``scale * source[indices]``, where ``indices`` are expressions in ``variables``, one an axis.

    ``exclusive``: nothing else uses the source.
    """

    source: relax.Expr
    variables: tuple[tirx.Var, ...]
    indices: tuple[Any, ...]
    scale: float = 1.0
    exclusive: bool = True

    def at(self, tensor: te.Tensor, *point: Any) -> Any:
        """The element of ``tensor``, which is the source, for values of the variables; the scale is left out."""
        values = {v: p for v, p in zip(self.variables, point, strict=True)}
        return tensor(*(replaced(index, values) for index in self.indices))


class Graph:
    """The bindings of a straight-line ``main`` and who uses what; for passes that look first and rewrite after."""

    def __init__(self, main: relax.Function) -> None:
        self.bound = {binding.var: binding.value for binding in bindings(main)}
        self._users: dict[relax.Var, list[relax.Var]] = {}
        self._uses = Counter(leaves(main.body.body))
        for var, value in self.bound.items():
            for leaf in leaves(value):
                self._uses[leaf] += 1
                self._users.setdefault(leaf, []).append(var)

    def call(self, expr: relax.Expr, *names: str) -> relax.Call | None:
        """The call that makes ``expr`` if it is one of the operators ``names`` (without ``relax.``), else None."""
        value = self.bound.get(expr, expr) if isinstance(expr, relax.Var) else expr
        if isinstance(value, relax.Call) and op_name(value).removeprefix("relax.") in names:
            return value
        return None

    def once(self, expr: relax.Expr) -> bool:
        """Whether the variable is used exactly once."""
        return isinstance(expr, relax.Var) and self._uses[expr] == 1

    def uses(self, var: relax.Expr) -> int:
        """How often the variable is used."""
        return self._uses[var]

    def reader(self, var: relax.Var) -> relax.Var | None:
        """The expression with the only use of ``var``; None if there are several uses, or it is the result."""
        return self._users[var][0] if self.once(var) and var in self._users else None

    def view(self, expr: relax.Expr, multiples: bool = False) -> View:
        """``expr`` by indices of what it is made of, as far back as no index divides either of its last two axes,
        which would make vectors along them jump about. ``multiples``: products with numbers are looked through too, and
        those of 16-bit floats that are widened for it and rounded again.
        """
        shape = shape_of(expr)
        variables = tuple(tirx.Var(f"x{axis}", "int64") for axis in range(len(shape)))
        analyzer = sym.Analyzer()
        for var, extent in zip(variables, shape, strict=True):
            analyzer.bind(var, tvm.ir.Range(i64(0), i64(extent)))
        indices = tuple(v if extent != 1 else i64(0) for v, extent in zip(variables, shape, strict=True))
        at = best = View(expr, variables, indices, exclusive=self.once(expr))
        names = (*_MOVEMENT, *_SCALING) if multiples else _MOVEMENT
        while (step := self._back(at, names)) is not None:
            at = replace(step, indices=tuple(analyzer.simplify(index) for index in step.indices),
                         exclusive=at.exclusive and self.once(step.source))
            if not any(_divides(index, variables[-2:]) for index in at.indices):
                best = at
        return best

    def _back(self, view: View, names: tuple[str, ...]) -> View | None:
        """The same elements as indices of the source's own operand, one operator further back."""
        call = self.call(view.source, *names) if isinstance(view.source, relax.Var) else None
        if call is None:
            return self._narrow_multiple(view) if set(_SCALING) <= set(names) else None
        name, source = op_name(call).removeprefix("relax."), call.args[0]
        if name in _SCALING:
            number = scalar_of(call.args[1])
            if not number or shape_of(source) != shape_of(call):
                return None
            return replace(view, source=source, scale=view.scale * (number if name == "multiply" else 1.0 / number))
        moved = _moved(call, name, view.indices)
        return replace(view, source=source, indices=tuple(moved)) if moved is not None else None


    def _narrow_multiple(self, view: View) -> View | None:
        """Through ``astype(astype(x, "float32") * number, type of x)``, whose rounding is left out."""
        rounded = self.call(view.source, "astype")
        scaled = self.call(rounded.args[0], *_SCALING) if rounded is not None and self.once(rounded.args[0]) else None
        wide = self.call(scaled.args[0], "astype") if scaled is not None else None
        if rounded is None or scaled is None or wide is None:
            return None
        source, number = wide.args[0], scalar_of(scaled.args[1])
        same = dtype_of(source) == dtype_of(rounded) and shape_of(source) == shape_of(scaled)
        if not number or not same or dtype_of(source) not in ("float16", "bfloat16"):
            return None
        factor = number if op_name(scaled) == "relax.multiply" else 1.0 / number
        return replace(view, source=source, scale=view.scale * factor)


def _moved(call: relax.Call, name: str, indices: Sequence[Any]) -> list[Any] | None:
    """The position in the argument of ``call`` of the element at ``indices`` of its result."""
    shape = shape_of(call.args[0])
    if name == "permute_dims":
        order = permutation(call)
        return [indices[order.index(axis)] for axis in range(len(order))]
    if name == "reshape":
        into, kept = shape_of(call), 0
        if any(isinstance(extent, Size) for extent in shape):  # the analyzer cannot divide by them
            while kept < min(len(into), len(shape)) and into[-1 - kept] == shape[-1 - kept]:
                kept += 1
        inner, shape = list(indices[len(into) - kept :]), shape[: len(shape) - kept]
        offset: Any = i64(0)
        for index, extent in zip(indices[: len(into) - kept], into, strict=False):
            offset = offset * extent + index
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        first, *outer = [tirx.floordiv(offset, step) for step in strides] if strides else [None]
        outer = [tirx.floormod(index, n) for index, n in zip(outer, shape[1:], strict=False)]
        return [*([] if first is None else [first]), *outer, *inner]
    if name == "broadcast_to":
        trailing = indices[len(indices) - len(shape) :]
        return [i64(0) if extent == 1 else i for i, extent in zip(trailing, shape, strict=True)]
    found = cuts(call)
    return None if found is None else [i * cut.step + cut.begin for i, cut in zip(indices, found, strict=True)]


def _divides(index: Any, variables: Sequence[tirx.Var]) -> bool:
    """Whether an index divides something that one of ``variables`` is in."""
    found = [False]
    walk(index, ((tirx.FloorDiv, tirx.FloorMod), lambda n: found.__setitem__(0, found[0] or bool(uses(n, variables)))))
    return found[0]
