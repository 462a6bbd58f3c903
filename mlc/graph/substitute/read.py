"""From Relax to terms: what the operator table knows, and everything else as opaque leaves.

A concatenation of many becomes one of pairs, a slice along several axes one slice an axis, an operand of lower rank
gets axes of length 1 in front; writing the terms undoes all that. Constants of one element are tensors of rank 0.
What has free sizes is in the language where its shape follows for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from tvm import relax

from mlc.graph.ir.constants import array_of
from mlc.graph.ir.movement import cuts
from mlc.graph.ir.rewrite import bindings, dtype_of, leaves, op_name, shape_of
from mlc.operators import OPERATORS, relax_where
from mlc.operators.shapes import fixed, inferred
from mlc.operators.tensor import ShapeError
from mlc.sizes import UndecidedSizeError
from mlc.substitution.terms import CONSTANT, INPUT, OPAQUE, Term, TermBuilder, TermGraph

__all__ = ["Reading", "read"]

#: operators by their names in Relax
_KNOWN = {each.relax.name: each for each in OPERATORS.values() if each.relax is not None}
_GATHER = "take"
#: those that are not defined everywhere, of the table and of the others
_PARTIAL = relax_where(lambda each: each.partial)


@dataclass
class Reading:
    """The terms of ``main`` and what its leaves stand for.

    ``inputs``, ``constants`` and ``opaques`` are by the leaf's ``id``: a parameter of main; an array; the variable
    that an expression of main is bound to, whose operands in the language are the leaf's inputs.
    """

    graph: TermGraph
    inputs: list[relax.Var] = field(default_factory=list)
    constants: list[np.ndarray] = field(default_factory=list)
    opaques: list[relax.Var] = field(default_factory=list)
    #: the expressions behind opaque leaves, and those between them that are no tensors of the language
    bound: dict[relax.Var, relax.Expr] = field(default_factory=dict)
    #: the tensors of the language that the result is made of, in the order of the outputs
    results: list[relax.Var] = field(default_factory=list)
    #: the places of variables of main
    places: dict[relax.Var, int] = field(default_factory=dict)


def read(func: relax.Function) -> Reading:
    """The terms of a straight-line function. Outputs are the tensors that its result is made of."""
    return _Reader(func).run()


class _Reader:
    def __init__(self, func: relax.Function) -> None:
        self._func = func
        self._out = Reading(TermGraph((), ()))
        self._build = TermBuilder()
        self._ids: dict[tuple[object, ...], int] = {}
        self._kept: list[relax.Expr] = []  # keeps the ids of constants unique
        self._indices = ""  # the type of the integers that are gathered at: what rules join has one
        #: what becomes several operators
        self._rules: dict[str, Callable[[relax.Call], int | None]] = {
            "concat": self._concat, "strided_slice": self._slice,
            **{name: self._combination for name, each in _KNOWN.items() if each.pointwise and each.arity == 2},
        }

    def run(self) -> Reading:
        out = self._out
        for param in self._func.params:
            if isinstance(param.ty, relax.TensorType):
                out.places[param] = self._build.add(INPUT, (), shape_of(param), id=len(out.inputs))
                out.inputs.append(param)
        for binding in bindings(self._func):
            place = self._value(binding.var, binding.value)
            if place is not None:
                out.places[binding.var] = place
        out.results = list(dict.fromkeys(self._result_vars()))
        out.graph = self._build.graph([out.places[var] for var in out.results])
        return out

    def _result_vars(self) -> list[relax.Var]:
        """The tensors of the language that the result depends on directly."""
        pending, found = list(leaves(self._func.body.body)), []
        while pending:
            var = pending.pop(0)
            if var in self._out.places:
                found.append(var)
            elif var in self._out.bound:
                pending.extend(leaves(self._out.bound[var]))
        return found

    # -- one binding

    def _value(self, var: relax.Var, value: relax.Expr) -> int | None:
        """Its place; None for what is no tensor, which opaque leaves alone can read."""
        if isinstance(value, relax.Var) and value in self._out.places:
            return self._out.places[value]
        if isinstance(value, relax.Call) and isinstance(var.ty, relax.TensorType):
            name = op_name(value).removeprefix("relax.")
            known = name in _KNOWN and dtype_of(var) == "float32" and (
                self._gathers(value) if name == _GATHER else all(map(self._suits, value.args)))
            known = known and _something(shape_of(var))  # operators of the language have something to compute
            place = self._known(name, value) if known else None
            if place is not None:
                assert self._build.shape(place) == shape_of(var), f"{value} must keep its shape as terms"
                return place
        self._out.bound[var] = value
        if not isinstance(var.ty, relax.TensorType) or not isinstance(var.ty.shape, relax.ShapeExpr):
            return None
        sources = list(dict.fromkeys(self._tensors(value)))
        self._out.opaques.append(var)
        number = len(self._out.opaques) - 1
        name = op_name(value).removeprefix("relax.") if isinstance(value, relax.Call) else ""
        marks = {"whole": 0} if name in _PARTIAL else {}
        return self._build.add(OPAQUE, sources, shape_of(var), id=number, **marks)

    def _known(self, name: str, call: relax.Call) -> int | None:
        """The place of a call of an operator of the language; None where one is used in a way that the language lacks,
        for some of the sizes that are free too."""
        before = len(self._build.terms)
        try:
            place = self._rules.get(name, self._plain)(call)
            if place is not None and all(map(self._follows, self._build.terms[before:])):
                return place
        except UndecidedSizeError:
            pass
        self._build.forget(before)  # an equal call must not find what is in doubt
        return None

    def _follows(self, term: Term) -> bool:
        """Whether a term with free sizes has the shape that its operator makes; others have."""
        shapes = [self._build.shape(source) for source in term.inputs]
        if term.leaf or all(map(fixed, (term.shape, *shapes))):
            return True
        try:
            return inferred(term.op, shapes, dict(term.attributes)) == term.shape
        except ShapeError:
            return False

    def _tensors(self, value: relax.Expr) -> list[int]:
        """The places that an expression reads, through tuples and the like."""
        found: list[int] = []
        for leaf in leaves(value):
            if leaf in self._out.places:
                found.append(self._out.places[leaf])
            elif leaf in self._out.bound:
                found += self._tensors(self._out.bound[leaf])
        return found

    def _suits(self, arg: relax.Expr) -> bool:
        """Whether an argument is in the language, or no tensor."""
        if isinstance(arg, relax.Var):
            return arg in self._out.places and dtype_of(arg) == "float32"
        if isinstance(arg, relax.Tuple):
            return all(map(self._suits, arg.fields))
        if not isinstance(arg.ty, relax.TensorType):
            return True
        array = array_of(arg)
        return array is not None and array.dtype == np.float32

    def _gathers(self, call: relax.Call) -> bool:
        """Whether a table is in the language, and what says where to take rows is integers of one type."""
        table, indices = call.args
        known = indices in self._out.places if isinstance(indices, relax.Var) else array_of(indices) is not None
        if not known or not self._suits(table) or dtype_of(indices) not in ("int32", "int64"):
            return False
        self._indices = self._indices or dtype_of(indices)
        return dtype_of(indices) == self._indices

    def _operand(self, arg: relax.Expr) -> int:
        if isinstance(arg, relax.Var):
            return self._out.places[arg]
        array = array_of(arg)
        assert array is not None
        return self._constant(array, (arg.value.data_ptr(), array.shape), arg)

    def _constant(self, array: np.ndarray, key: tuple[object, ...], kept: relax.Expr) -> int:
        if key not in self._ids:
            self._ids[key] = len(self._out.constants)
            self._out.constants.append(array)
            self._kept.append(kept)
        marks = {} if np.isfinite(array).all() else {"whole": 0}
        return self._build.add(CONSTANT, (), array.shape, id=self._ids[key], **marks)

    # -- operators; None where one is used in a way that the language lacks

    def _plain(self, call: relax.Call) -> int | None:
        """The operator that bears the call's name, of the call's tensors."""
        known = _KNOWN[op_name(call).removeprefix("relax.")]
        assert known.relax is not None
        tensors = call.args[: known.arity]
        attributes = known.relax.read(call.attrs, [shape_of(arg) for arg in tensors], shape_of(call))
        if attributes is None:
            return None
        operands = list(map(self._operand, tensors))
        if attributes.get("shape") == self._build.shape(operands[0]):
            return operands[0]
        return self._build.add(known.name, operands, shape_of(call), **attributes)

    def _reshaped(self, place: int, shape: tuple[int, ...]) -> int:
        if self._build.shape(place) == shape:
            return place
        return self._build.add("reshape", [place], shape, shape=shape)

    def _concat(self, call: relax.Call) -> int | None:
        if not isinstance(call.args[0], relax.Tuple):
            return None
        axis = int(call.attrs.axis) % len(shape_of(call))
        first, *rest = [self._operand(field) for field in call.args[0].fields]
        for part in rest:
            shape = list(self._build.shape(first))
            shape[axis] += self._build.shape(part)[axis]
            first = self._build.add("concat", (first, part), shape, axis=axis)
        return first

    def _slice(self, call: relax.Call) -> int | None:
        found = cuts(call)
        if found is None or any(cut.step != 1 for cut in found):
            return None
        place = self._operand(call.args[0])
        for axis, cut in enumerate(found):
            shape = list(self._build.shape(place))
            if (cut.begin, cut.end) != (0, shape[axis]):
                shape[axis] = cut.end - cut.begin
                place = self._build.add("slice", [place], shape, axis=axis, begin=cut.begin, end=cut.end)
        return place

    def _combination(self, call: relax.Call) -> int:
        """An elementwise combination of operands of one rank."""
        rank = len(shape_of(call))
        operands = []
        for arg in call.args:
            array = array_of(arg)
            if array is not None:
                own = () if array.size == 1 else (1,) * (rank - array.ndim) + array.shape
                operands.append(self._constant(array.reshape(own), (arg.value.data_ptr(), own), arg))
            else:
                place = self._operand(arg)
                shape = self._build.shape(place)
                operands.append(self._reshaped(place, (1,) * (rank - len(shape)) + shape))
        if math.prod(shape_of(call)) == 1 and any(self._build.shape(o) != shape_of(call) for o in operands):
            operands = [self._reshaped(o, shape_of(call)) for o in operands]
        return self._build.add(_KNOWN[op_name(call).removeprefix("relax.")].name, operands, shape_of(call))


def _something(shape: tuple[int, ...]) -> bool:
    """Whether a shape has elements, whatever its free sizes are."""
    try:
        return all(size >= 1 for size in shape)
    except UndecidedSizeError:
        return False
