"""Memory planning of views: parts of a concatenation that needs no copy, contiguous slices, results.

After :func:`mlc.graph.lowering.concat.PlaceConcats`, each part of a concatenation left in ``main`` is made by a kernel,
and is part of nothing else. After :func:`mlc.graph.lowering.slices.PlaceSlices`, each slice left there is contiguous.
Results go where a caller wants them through a second entry, :data:`INTO`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import tvm
from tvm import relax

from mlc.graph.ir.movement import SLICE
from mlc.graph.ir.rewrite import bindings, builder_of, dtype_of, op_name, replaced, results_of, shape_of
from mlc.graph.ir.states import is_append
from mlc.graph.lowering.concat import ALIGNMENT, origin, parts_of
from mlc.graph.lowering.slices import offset_of
from mlc.sizes import free_sizes, size_of

__all__ = ["INTO", "VIEWS", "AddEntryInto", "ViewConcats", "ViewSlices", "WriteStates", "is_call"]

#: the entry that computes into tensors of its caller: ``y = main(x, w)`` is ``main_into(x, y, w)``
INTO = "main_into"

_ALLOC = "relax.builtin.alloc_tensor"
#: operators whose result is the memory of their first argument
VIEWS = ("relax.memory.view", "relax.memory.ensure_zero_offset", "relax.reshape")


def _view_concats(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
    if not any(is_call(b.value, "relax.concat") for b in bindings(mod["main"])):
        return mod
    return _Views(mod).rewritten()


def _write_states(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
    """``r = alloc(); f(x, r); s = append(r, state)`` --> ``r = view(state, past); f(x, r)``, and ``s`` is the state.

    :func:`mlc.graph.lowering.states.PlaceAppends` has seen to it that a kernel makes ``r`` for nothing else.
    """
    func = mod["main"]
    bound = {b.var: b.value for b in bindings(func)}
    appends = {var: value for var, value in bound.items() if is_append(value)}
    if not appends:
        return mod
    placed = {origin(value.args[0], bound): value for value in appends.values()}
    builder = builder_of(mod)
    image: dict[relax.Var, relax.Expr] = {}
    with builder.function("main", list(func.params), attrs=dict(func.attrs or {}), pure=bool(func.is_pure)):
        for var, value in bound.items():
            if var in appends:
                image[var] = replaced(value.args[1], image)
            elif var in placed:
                assert is_call(value, _ALLOC), f"{var.name} must be made by a kernel"
                image[var] = _last_rows(builder, placed[var].args[1], var)
            else:
                image[var] = builder.emit(replaced(value, image), var.name)
        builder.emit_func_output(replaced(func.body.body, image))
    made = builder.finalize()
    return made.with_attrs(dict(mod.attrs)) if mod.attrs else made


def _last_rows(builder: relax.BlockBuilder, state: relax.Var, rows: relax.Var) -> relax.Expr:
    """The last rows of a state, as many as ``rows`` has."""
    first = size_of(state.ty.shape.values[0]) - shape_of(rows)[0]
    offset = first * math.prod(shape_of(state)[1:]) * tvm.DataType(dtype_of(rows)).itemsize
    view = relax.op.memory.view(state, shape_of(rows), dtype_of(rows), offset.expr)
    return builder.emit(relax.op.memory.ensure_zero_offset(builder.emit(view, rows.name)))


def is_call(value: relax.Expr | None, name: str) -> bool:
    """Whether a value is a call of the operator ``name``."""
    return isinstance(value, relax.Call) and op_name(value) == name


class _Views:
    """The location of each allocated tensor that is part of another one: ``(whole, byte offset)``."""

    def __init__(self, mod: tvm.IRModule) -> None:
        self._mod = mod
        self._bound: dict[relax.Var, relax.Expr] = {b.var: b.value for b in bindings(mod["main"])}
        self._place: dict[relax.Var, tuple[relax.Var, int]] = {}
        for var, value in reversed(list(self._bound.items())):
            if is_call(value, "relax.concat"):
                whole, start = self._place.get(var, (var, 0))
                for part, offset in parts_of(value):
                    source = self._made(part)
                    assert source not in self._place, f"{source.name} must be part of one tensor only"
                    self._place[source] = whole, start + offset

    def _made(self, part: relax.Expr) -> relax.Var:
        """The tensor allocated for a part, or the concatenation that it is."""
        source = origin(part, self._bound)
        value = self._bound.get(source)
        if isinstance(value, relax.TupleGetItem):
            source = origin(self._bound[value.tuple_value].fields[value.index], self._bound)
            value = self._bound.get(source)
        assert is_call(value, _ALLOC) or is_call(value, "relax.concat"), f"{part} must be made by a kernel"
        return source

    def rewritten(self) -> tvm.IRModule:
        func = self._mod["main"]
        builder = builder_of(self._mod)
        image: dict[relax.Var, relax.Expr] = {}
        wholes: dict[relax.Var, relax.Expr] = {}
        with builder.function("main", list(func.params), attrs=dict(func.attrs or {}), pure=bool(func.is_pure)):
            for var, value in self._bound.items():
                if var in self._place or is_call(value, "relax.concat"):
                    whole, offset = self._place.get(var, (var, 0))
                    if whole not in wholes:
                        wholes[whole] = builder.emit(_allocation(whole), whole.name)
                    image[var] = wholes[whole] if var.same_as(whole) else _view(builder, wholes[whole], var, offset)
                else:
                    image[var] = builder.emit(replaced(value, image), var.name)
            builder.emit_func_output(replaced(func.body.body, image))
        made = builder.finalize()
        return made.with_attrs(dict(self._mod.attrs)) if self._mod.attrs else made


def _allocation(whole: relax.Var) -> relax.Expr:
    shape = relax.ShapeExpr(shape_of(whole))
    return relax.op.builtin.alloc_tensor(shape, dtype_of(whole), 0)


def _view(builder: relax.BlockBuilder, whole: relax.Expr, part: relax.Var, offset: int) -> relax.Expr:
    """``part`` at ``offset`` bytes of ``whole``, as kernels take it: they want pointers to the first element."""
    assert not offset % ALIGNMENT, "a view must start where compiled code can read it"
    view = builder.emit(relax.op.memory.view(whole, shape_of(part), dtype_of(part), offset), part.name)
    return builder.emit(relax.op.memory.ensure_zero_offset(view)) if offset else view


def _view_slices(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
    func = mod["main"]
    if not any(is_call(b.value, SLICE) for b in bindings(func)):
        return mod
    builder = builder_of(mod)
    image: dict[relax.Var, relax.Expr] = {}
    with builder.function("main", list(func.params), attrs=dict(func.attrs or {}), pure=bool(func.is_pure)):
        for binding in bindings(func):
            value = replaced(binding.value, image)
            if is_call(binding.value, SLICE):
                offset = offset_of(binding.value)
                assert offset is not None, f"{binding.var.name} must lie in one piece"
                image[binding.var] = _view(builder, value.args[0], binding.var, offset)
            else:
                image[binding.var] = builder.emit(value, binding.var.name)
        builder.emit_func_output(replaced(func.body.body, image))
    made = builder.finalize()
    return made.with_attrs(dict(mod.attrs)) if mod.attrs else made


def _add_entry_into(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
    """``main(x, w) { y = alloc(); f(x, w, y); y }`` stays, beside ``main_into(x, y, w) { f(x, w, y); y }``.

    A result that is an input, a weight, a part of another tensor or the memory of an earlier result cannot be placed:
    the caller sees by its address that it lies elsewhere, and copies it. Where a call decides sizes, the entry is left
    out: what the memory of an output must hold is known when the model has run.
    """
    func = mod["main"]
    if free_sizes(mod):
        return mod
    bound = {b.var: b.value for b in bindings(func)}
    results = results_of(func.body.body, bound)
    outs = [relax.Var(f"out_{i}", relax.TensorType(shape_of(r), dtype_of(r))) for i, r in enumerate(results)]
    placed: dict[relax.Var, relax.Var] = {}
    for result, out in zip(results, outs, strict=True):
        source = _memory_of(result, bound)
        if is_call(bound.get(source), _ALLOC) and _bytes(source) == _bytes(out):
            placed.setdefault(source, out)
    count = int(func.attrs["num_input"])
    params = [*func.params[:count], *outs, *func.params[count:]]
    attrs = {**dict(func.attrs), "num_input": count + len(outs), "global_symbol": INTO}
    builder = builder_of(mod)
    image: dict[relax.Var, relax.Expr] = {p: relax.Var(p.name, p.ty) for p in func.params}  # each function has its own
    with builder.function(INTO, [image.get(p, p) for p in params], attrs=attrs, pure=bool(func.is_pure)):
        for var, value in bound.items():
            if var in placed:
                image[var] = _in_place(builder, placed[var], var)
            else:
                image[var] = builder.emit(_apart(replaced(value, image)), var.name)
        builder.emit_func_output(replaced(func.body.body, image))
    into = builder.finalize()
    both = tvm.IRModule({**dict(mod.functions), into.get_global_var(INTO): into[INTO]})
    return both.with_attrs(dict(mod.attrs)) if mod.attrs else both


def _memory_of(expr: relax.Expr, bound: Mapping[relax.Var, relax.Expr]) -> relax.Expr:
    """The tensor that this one is a view of, or the kernel result that it is one of."""
    expr = origin(expr, bound)
    while (value := bound.get(expr)) is not None:
        if any(is_call(value, name) for name in VIEWS):
            expr = origin(value.args[0], bound)
        elif isinstance(value, relax.TupleGetItem) and isinstance(bound.get(value.tuple_value), relax.Tuple):
            expr = origin(bound[value.tuple_value].fields[value.index], bound)
        else:
            break
    return expr


def _bytes(tensor: relax.Expr) -> int:
    return math.prod(shape_of(tensor)) * tvm.DataType(dtype_of(tensor)).itemsize


def _apart(value: relax.Expr) -> relax.Expr:
    """A copy of a call: the planner of memory goes by the identity of calls, which two functions must not share."""
    return relax.Call(value.op, value.args, value.attrs, value.ty_args) if isinstance(value, relax.Call) else value


def _in_place(builder: relax.BlockBuilder, out: relax.Var, var: relax.Var) -> relax.Expr:
    same = (shape_of(out), dtype_of(out)) == (shape_of(var), dtype_of(var))
    return out if same else builder.emit(relax.op.memory.view(out, shape_of(var), dtype_of(var), 0), var.name)


AddEntryInto = tvm.transform.module_pass(_add_entry_into, opt_level=0, name="AddEntryInto")
ViewSlices = tvm.transform.module_pass(_view_slices, opt_level=0, name="ViewSlices")
ViewConcats = tvm.transform.module_pass(_view_concats, opt_level=0, name="ViewConcats")
WriteStates = tvm.transform.module_pass(_write_states, opt_level=0, name="WriteStates")
