"""The state of a model (such as a key-value cache): memory of the caller that compiled code appends to in place.

A language model takes the keys and values of former tokens and gives back these and the new ones behind them. Copied,
that costs as much as it is long. Here its tensor is ``[rows, batch, heads, size]`` with the rows outermost, so that
the new rows lie behind the others in one piece whatever the batch is: a call is given a view of a longer buffer that
ends where the new rows will, writes those, and reads all of it where it lies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tvm
from tvm import relax

from mlc.errors import ModelError
from mlc.graph.ir.rewrite import bindings, builder_of, dtype_of, op_name, replaced, results_of, shape_of
from mlc.sizes import free_sizes, scope

__all__ = ["APPEND", "PAST", "is_append", "keep_states"]

#: ``append(rows, state)`` is the state with ``rows`` as the last of its own; until memory is planned it is one call
APPEND = "mlc.append"
#: the input whose length says how many rows a state has before a call
PAST = "past_length"

_ROWS_FIRST, _ROWS_THIRD = [2, 0, 1, 3], [1, 2, 0, 3]
_ALIGNMENT = 64  # bytes


def is_append(value: relax.Expr) -> bool:
    """Whether the expression is a call of :data:`APPEND`, in the dataflow form or after it."""
    if not isinstance(value, relax.Call):
        return False
    named = value.args[0] if op_name(value) == "relax.call_pure_packed" else value.op
    return isinstance(named, relax.ExternFunc) and str(named.global_symbol) == APPEND


def keep_states(mod: tvm.IRModule, states: Mapping[str, int], names: Sequence[str]) -> tvm.IRModule:
    """``main(.., past[b, h, p, d]) { .. present = concat(past, new, 2) .. (.., present) }`` as one that writes ``new``
    into memory of its caller's.

    ``states`` are the inputs that are pasts, by their names among ``names``, and which output is the present of each.
    The input becomes ``[p + new, batch, heads, size]``, the output is gone, and an input :data:`PAST` of ``p`` bytes
    follows the others. Raises :class:`ModelError` where a present is anything else than the past and new rows.
    """
    func = mod["main"]
    bound = {b.var: b.value for b in bindings(func)}
    results = results_of(func.body.body, bound)
    param = {name: func.params[names.index(name)] for name in states}
    joined = {_source(results[out], bound): name for name, out in states.items()}
    params, image = list(func.params), dict[relax.Var, relax.Expr]()
    builder = builder_of(mod)
    kept: dict[str, relax.Var] = {}
    for name, out in states.items():
        past = param[name]
        if not _joins(bound.get(_source(results[out], bound)), past, bound):
            raise ModelError(f"what follows from {name} must be its rows and new ones behind them, along the third of "
                             "four axes, but is computed otherwise; export the model with a cache that grows")
        batch, heads, _, size = shape_of(past)
        if batch * heads * size * tvm.DataType(dtype_of(past)).itemsize % _ALIGNMENT:
            raise ModelError(f"{name} must have rows of a multiple of {_ALIGNMENT} bytes, got {dtype_of(past)} of "
                             f"{batch} x {heads} x {size}; compile the model for another batch")
        rows = past.ty.shape.values[2] + _rows_added(bound[_source(results[out], bound)])
        kept[name] = relax.Var(past.name, relax.TensorType([rows, batch, heads, size], dtype_of(past)))
        params[names.index(name)] = kept[name]
    some = next(iter(param.values()))
    params.append(relax.Var(PAST, relax.TensorType([some.ty.shape.values[2]], "uint8")))
    left = [result for i, result in enumerate(results) if i not in states.values()]
    with scope(free_sizes(mod)), builder.function("main", params, attrs=dict(func.attrs or {})):
        with builder.dataflow():
            for name, past in param.items():  # what a model reads of the past alone; mostly its length only
                old = relax.op.strided_slice(kept[name], [0], [0], [past.ty.shape.values[2]], assume_inbound=True)
                image[past] = builder.emit(relax.op.permute_dims(builder.emit(old), _ROWS_THIRD))
            for var, value in bound.items():
                if var in joined:
                    state = kept[joined[var]]
                    new = builder.emit(relax.op.permute_dims(replaced(value.args[0].fields[1], image), _ROWS_FIRST))
                    whole = relax.call_pure_packed(APPEND, new, state, ty_args=[state.ty])
                    image[var] = builder.emit(relax.op.permute_dims(builder.emit(whole), _ROWS_THIRD), var.name)
                else:
                    image[var] = builder.emit(replaced(value, image), var.name)
            output = [replaced(result, image) for result in left]
            result = builder.emit_output(output[0] if len(output) == 1 else relax.Tuple(output))
        builder.emit_func_output(result)
    made = relax.transform.DeadCodeElimination()(builder.finalize())
    return made.with_attrs(dict(mod.attrs)) if mod.attrs else made


def _source(expr: relax.Expr, bound: Mapping[relax.Var, relax.Expr]) -> relax.Expr:
    """The expression that ``expr`` is an alias of; a concatenation of a single tensor is an alias."""
    while (value := bound.get(expr)) is not None:
        if isinstance(value, relax.Call) and op_name(value) == "relax.concat" and len(value.args[0].fields) == 1:
            value = value.args[0].fields[0]
        if not isinstance(value, relax.Var):
            break
        expr = value
    return expr


def _joins(value: relax.Expr | None, past: relax.Var, bound: Mapping[relax.Var, relax.Expr]) -> bool:
    if not isinstance(value, relax.Call) or op_name(value) != "relax.concat":
        return False
    parts = list(value.args[0].fields) if isinstance(value.args[0], relax.Tuple) else []
    return (len(parts) == 2 and _source(parts[0], bound).same_as(past) and len(past.ty.shape.values) == 4
            and int(value.attrs.axis) % 4 == 2 and isinstance(past.ty.shape.values[2], tvm.tirx.Var))


def _rows_added(concat: relax.Call) -> relax.Expr:
    return concat.args[0].fields[1].ty.shape.values[2]
