"""Lifts weights out of the program: constants of ``main`` become parameters after its inputs.

Constants inside TVM's executable are copied into an object file, linked, and copied again at every load: for 550 MB
that took 11 s and 2.2 GB to build and 0.9 s and 2.2 GB to load. As parameters they are written once and read into
memory by several threads, at what it takes to copy and check them once, or mapped: 1 ms, and nothing is checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tvm
from tvm import relax

from mlc.graph.ir.constants import tensor_of
from mlc.graph.ir.rewrite import bindings, op_name, replaced

__all__ = ["aliased_outputs", "lift"]


def lift(
    mod: tvm.IRModule, symbols: Mapping[str, str] | None = None
) -> tuple[tvm.IRModule, list[tvm.runtime.Tensor]]:
    """``main(x) { f(x, const) }  -->  main(x, w0) { f(x, w0) }, [const]``.

    A tensor that several constants share becomes one parameter. ``symbols`` renames the functions that are called, and
    functions that nothing calls any more are left out.
    """
    func = mod["main"]
    lifting = _Lifting(mod, symbols or {})
    bound = [(binding.var, lifting.expression(binding.value)) for binding in bindings(func)]
    result = lifting.expression(func.body.body)
    attrs = {**dict(func.attrs or {}), "num_input": len(func.params), "global_symbol": "main"}
    builder = relax.BlockBuilder(tvm.IRModule({var: mod[var] for var in lifting.called}))
    image: dict[relax.Var, relax.Expr] = {}
    with builder.function("main", [*func.params, *lifting.params], attrs=attrs):
        with builder.dataflow():
            for var, value in bound:
                image[var] = builder.emit(replaced(value, image), var.name)
            output = builder.emit_output(replaced(result, image))
        builder.emit_func_output(output)
    lifted = builder.finalize()
    return lifted.with_attrs(dict(mod.attrs)) if mod.attrs else lifted, lifting.tensors


class _Lifting:
    """Replaces constants by parameters and renames functions, remembering both."""

    def __init__(self, mod: tvm.IRModule, symbols: Mapping[str, str]) -> None:
        self._mod, self._symbols = mod, symbols
        self._of: dict[tuple[int, tuple[int, ...], str], relax.Var] = {}
        self.params: list[relax.Var] = []
        self.tensors: list[tvm.runtime.Tensor] = []
        self.called: dict[tvm.ir.GlobalVar, None] = {}

    def expression(self, expr: relax.Expr) -> relax.Expr:
        if tensor_of(expr) is not None:
            return self._parameter(expr)
        if isinstance(expr, tvm.ir.GlobalVar):
            name = expr.name_hint
            var = self._mod.get_global_var(self._symbols.get(name, name))
            self.called[var] = None
            return var
        if isinstance(expr, relax.Call):
            return relax.Call(expr.op, [self.expression(a) for a in expr.args], expr.attrs, expr.ty_args)
        if isinstance(expr, relax.Tuple):
            return relax.Tuple([self.expression(field) for field in expr.fields])
        if isinstance(expr, relax.TupleGetItem):
            return relax.TupleGetItem(self.expression(expr.tuple_value), expr.index)
        return expr

    def _parameter(self, expr: relax.Expr) -> relax.Var:
        tensor = expr.value
        key = (int(tensor.data_ptr()), tuple(tensor.shape), str(tensor.dtype))
        if key not in self._of:
            self._of[key] = relax.Var(f"weight_{len(self.params)}", expr.ty)
            self.params.append(self._of[key])
            self.tensors.append(tensor)
        return self._of[key]


def aliased_outputs(func: relax.Function) -> tuple[bool, ...]:
    """For each output of ``main``, whether its memory is that of an input, a weight or an earlier output. Such an
    output is copied before a caller gets it."""
    bound = {binding.var: binding.value for binding in bindings(func)}

    def origin(expr: relax.Expr) -> relax.Expr:
        while expr in bound:
            value = bound[expr]
            if isinstance(value, relax.Call) and op_name(value) == "relax.reshape":
                expr = value.args[0]
            elif isinstance(value, relax.Var):
                expr = value
            elif isinstance(value, relax.TupleGetItem) and isinstance(bound.get(value.tuple_value), relax.Tuple):
                expr = bound[value.tuple_value].fields[value.index]
            else:
                return expr
        return expr

    outputs = _outputs(func, bound)
    origins = [origin(expr) for expr in outputs]
    return tuple(expr not in bound or any(expr.same_as(o) for o in origins[:i]) for i, expr in enumerate(origins))


def _outputs(func: relax.Function, bound: Mapping[relax.Var, relax.Expr]) -> Sequence[relax.Expr]:
    result = func.body.body
    while result in bound and isinstance(bound[result], relax.Var | relax.Tuple):
        result = bound[result]
    return list(result.fields) if isinstance(result, relax.Tuple) else [result]
