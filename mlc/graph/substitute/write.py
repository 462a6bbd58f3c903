"""From terms to Relax: the extracted graph, with its constants folded."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op

from mlc.graph.ir.constants import constant
from mlc.graph.ir.rewrite import emit_result, leaves, replaced, shape_of
from mlc.graph.substitute.fold import fold
from mlc.graph.substitute.names import names
from mlc.graph.substitute.read import Reading
from mlc.operators import OPERATORS
from mlc.sizes import Size
from mlc.substitution.terms import CONSTANT, INPUT, OPAQUE, Term, TermGraph

__all__ = ["write"]

def _builder(name: str) -> Callable[..., relax.Expr]:
    """The function of ``tvm.relax.op`` that builds a call of the operator ``name``, without ``relax.``."""
    return reduce(getattr, name.split("."), op)


def _expressed(value: Any) -> Any:
    """An argument in TVM's expressions where it has free sizes."""
    if isinstance(value, tuple | list):
        return type(value)(map(_expressed, value))
    return value.expr if isinstance(value, Size) else value


def write(mod: tvm.IRModule, reading: Reading, graph: TermGraph) -> tvm.IRModule:
    """``mod`` with ``graph`` for its ``main``; leaves mean what ``reading`` says, outputs are its results in order."""
    return _Writer(mod, reading, graph.live()).run()


class _Writer:
    def __init__(self, mod: tvm.IRModule, reading: Reading, graph: TermGraph) -> None:
        self._mod, self._reading, self._graph = mod, reading, graph
        self._readers = graph.readers()
        self._constant = graph.constant_places()
        self._folded: dict[int, np.ndarray] = {}
        self._names = names(reading, graph)
        self._keep_finite()
        self._made: dict[int, relax.Expr] = {}
        self._image: dict[relax.Var, relax.Expr] = {}

    def _keep_finite(self) -> None:
        """Leaves to run time what would make infinities of finite constants: ``x * 1e30 * 1e30`` is finite for small x,
        ``x * inf`` is not."""
        for place, term in enumerate(self._graph.terms):
            if place not in self._constant or term.leaf or not term.inputs:
                continue
            known = all(source in self._constant for source in term.inputs)
            if not known or self._overflows(place, term):
                self._constant.discard(place)

    def _overflows(self, place: int, term: Term) -> bool:
        """Whether a term of finite constants is not finite."""
        finite = (np.isfinite(self._array(each)).all() for each in (*term.inputs, place))
        *inputs, result = finite
        return all(inputs) and not result

    def run(self) -> tvm.IRModule:
        main = self._mod["main"]
        others = {g: f for g, f in self._mod.functions_items() if g.name_hint != "main"}
        builder = self._builder = relax.BlockBuilder(tvm.IRModule(others))
        with builder.function("main", list(main.params), attrs=dict(main.attrs or {})):
            with builder.dataflow():
                for place in range(len(self._graph.terms)):
                    if place not in self._constant and not self._inner_concat(place):
                        self._made[place] = self._term(place)
                for var, place in zip(self._reading.results, self._graph.outputs, strict=True):
                    self._image[var] = self._value(place)
                result = emit_result(builder, self._original(main.body.body))
            builder.emit_func_output(result)
        return builder.finalize()

    def _value(self, place: int) -> relax.Expr:
        if place not in self._made:
            self._made[place] = constant(self._array(place), str(self._array(place).dtype))
        return self._made[place]

    def _array(self, place: int) -> np.ndarray:
        """The value of what depends on constants alone."""
        if place not in self._folded:
            term = self._graph.terms[place]
            if term.op == CONSTANT:
                self._folded[place] = self._reading.constants[term["id"]]
            else:
                self._folded[place] = fold(term, [self._array(source) for source in term.inputs])
        return self._folded[place]

    # -- leaves

    def _term(self, place: int) -> relax.Expr:
        term = self._graph.terms[place]
        if term.op == INPUT:
            return self._reading.inputs[term["id"]]
        if term.op == OPAQUE:
            return self._opaque(term)
        return self._builder.emit(self._call(place, term), self._names.get(place, ""))

    def _opaque(self, term: Term) -> relax.Expr:
        """The expression of an opaque leaf, with its operands replaced."""
        var = self._reading.opaques[term["id"]]
        before = next(t for t in self._reading.graph.terms if t.op == OPAQUE and t["id"] == term["id"])
        now = dict(zip(before.inputs, term.inputs, strict=True))
        for other, place in self._reading.places.items():
            if place in now and other not in self._image:
                self._image[other] = self._value(now[place])
        return self._bound(var)

    def _bound(self, var: relax.Var) -> relax.Expr:
        if var not in self._image:
            self._image[var] = self._builder.emit(self._original(self._reading.bound[var]), var.name)
        return self._image[var]

    def _original(self, expr: relax.Expr) -> relax.Expr:
        """An expression of the module as it was, of what its variables have become."""
        if isinstance(expr, relax.Var):
            if expr not in self._image and expr in self._reading.bound:
                return self._bound(expr)
            return self._image.get(expr, expr)
        image = {leaf: self._original(leaf) for leaf in dict.fromkeys(leaves(expr))}
        return replaced(expr, image)

    # -- operators

    def _call(self, place: int, term: Term) -> relax.Expr:
        if term.op == "concat":
            return op.concat([self._value(part) for part in self._parts(place)], term["axis"])
        args = [self._value(source) for source in term.inputs]
        if term.op == "reciprocal":
            return op.divide(relax.const(1.0, "float32"), *args)
        called = OPERATORS[term.op].relax
        assert called is not None, f"{term.op} is evaluated when the model is compiled"
        given = called.write(dict(term.attributes), [shape_of(arg) for arg in args], term.shape)
        return _builder(called.name)(*args, **{name: _expressed(value) for name, value in given.items()})

    def _inner_concat(self, place: int) -> bool:
        """Whether a concatenation is only there to be part of a longer one."""
        term, readers = self._graph.terms[place], self._readers[place]
        if term.op != "concat" or len(readers) != 1 or place in self._graph.outputs:
            return False
        reader = self._graph.terms[readers[0]]
        return reader.op == "concat" and reader["axis"] == term["axis"] and reader.inputs.count(place) == 1

    def _parts(self, place: int) -> list[int]:
        return [
            part for source in self._graph.terms[place].inputs
            for part in (self._parts(source) if self._inner_concat(source) else [source])
        ]
