"""Checks at build time that the calls of a compiled model fit its functions, so that these need not check at run time.

TVM has each function check its arguments each time that it is called: two dozen conditions with a message each, which
are a sixth of the time that code generation takes and more than half of the machine code of a model of small functions.
Where sizes are fixed the answer is known at build time, once for each call.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax, tirx

from mlc.artifact.memory import VIEWS, is_call
from mlc.graph.ir.movement import SLICE
from schedules.alignment import ANYWHERE
from schedules.lowering import FITS

__all__ = ["WEIGHTS_FIT", "CheckCalls", "CheckWeights"]

#: the function of the artifact that takes the weights, and refuses those of other shapes or types
WEIGHTS_FIT = "weights_fit"

_ALLOCATE = "relax.builtin.alloc_tensor"
#: operators of which :mod:`mlc.artifact.memory` makes views, whole and in one piece
_VIEWS = (*VIEWS, "relax.concat", SLICE)


@tvm.transform.module_pass(opt_level=0, name="mlc.CheckCalls")
def CheckCalls(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
    """Mark by :data:`schedules.lowering.FITS` the functions whose arguments fit wherever they are called, and by
    :data:`schedules.alignment.ANYWHERE` the arguments of others that memory of a caller may be.

    Takes a module in which results are allocated (after ``CallTIRRewrite``). Arguments fit where shapes are fixed, they
    and the types are those of the function's buffers, and the tensor is a weight or was allocated in the same function
    of the graph: it is contiguous and aligned then. What a caller hands in is checked as it runs, and so are free
    sizes. (A call of another fixed shape or type than the function's is refused by TVM as the graph is rewritten.)
    """
    functions = {var: func for var, func in mod.functions_items() if isinstance(func, tirx.PrimFunc)}
    calls = _Calls(functions)
    for func in mod.functions.values():
        if isinstance(func, relax.Function):
            inputs = (func.attrs or {}).get("num_input")
            calls.ours = set() if inputs is None else set(func.params[int(inputs):])
            calls.visit_expr(func)
    result = mod.clone()
    for var in calls.called - calls.doubtful:
        result.update_func(var, functions[var].with_attr(FITS, True))
    for var, func in functions.items():
        tensors = [number for number, param in enumerate(func.params) if not isinstance(param.ty, tvm.ir.PrimType)]
        if theirs := [number for number in tensors if calls.is_theirs(var, number)]:
            result.update_func(var, func.with_attr(ANYWHERE, theirs))
    return result


@tvm.transform.module_pass(opt_level=0, name="mlc.CheckWeights")
def CheckWeights(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
    """Add :data:`WEIGHTS_FIT`, which is called once, when weights are bound: neither the virtual machine nor functions
    whose arguments fit compare them with what they were compiled for. ``VMShapeLower`` writes its comparisons."""
    main = mod["main"]
    inputs = (main.attrs or {}).get("num_input")
    weights = [] if inputs is None else [relax.Var(p.name, p.ty) for p in main.params[int(inputs):]]
    if not weights:
        return mod
    result = mod.clone()
    body = relax.SeqExpr([], relax.Tuple([]))
    func = relax.Function(weights, body, relax.TupleType([]), is_pure=True)
    result[WEIGHTS_FIT] = func.with_attr("global_symbol", WEIGHTS_FIT)
    return result


@relax.expr_functor.visitor
class _Calls(relax.PyExprVisitor):
    """Looks at each call of a tensor function: those that are ``called``, and those of which some call is
    ``doubtful``, or that something else names."""

    def __init__(self, functions: dict[Any, tirx.PrimFunc]) -> None:
        super().__init__()
        self._functions = functions
        self.called: set[Any] = set()
        self.doubtful: set[Any] = set()
        self._theirs: set[tuple[Any, int]] = set()
        self._named: set[Any] = set()
        self.ours: set[Any] = set()  # variables of tensors that no caller of the model has made

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        if self._is_ours(binding.value):
            self.ours.add(binding.var)
        self.visit_expr(binding.value)

    def _is_ours(self, value: relax.Expr) -> bool:
        if isinstance(value, relax.Tuple):
            return all(map(self._is_ours, value.fields))
        if any(is_call(value, name) for name in _VIEWS):
            return self._is_ours(value.args[0])
        return is_call(value, _ALLOCATE) or value in self.ours

    def visit_call_(self, call: relax.Call) -> None:
        if call.op in self._functions:
            self.called.add(call.op)
            if not self._fits(self._functions[call.op], call):
                self.doubtful.add(call.op)
            self._theirs.update((call.op, number) for number, arg in enumerate(call.args) if arg not in self.ours)
        else:
            self.visit_expr(call.op)
        for arg in call.args:
            self.visit_expr(arg)

    def visit_global_var_(self, var: Any) -> None:
        self.doubtful.add(var)
        self._named.add(var)

    def is_theirs(self, function: Any, number: int) -> bool:
        """Whether an argument may be memory that neither compiled code nor who loads it has allocated."""
        return function in self._named or (function, number) in self._theirs

    def _fits(self, func: tirx.PrimFunc, call: relax.Call) -> bool:
        params = list(func.params)
        if len(params) != len(call.args):
            return False
        return all(
            arg in self.ours and (wanted := _fixed(func, param)) is not None and wanted == _handed(arg)
            for param, arg in zip(params, call.args, strict=True)
        )


def _fixed(func: tirx.PrimFunc, param: Any) -> tuple[tuple[int, ...], str] | None:
    """The shape and type of a parameter that is a tensor of fixed sizes."""
    shape = getattr(param, "shape", None)
    if shape is None or not all(isinstance(extent, tirx.IntImm) for extent in shape):
        return None
    return tuple(int(extent) for extent in shape), str(param.dtype)


def _handed(arg: relax.Expr) -> tuple[tuple[int, ...], str] | None:
    """The shape and type of an argument that is a tensor of fixed sizes."""
    if not isinstance(arg, relax.Var) or not isinstance(arg.ty, relax.TensorType):
        return None
    shape = arg.ty.shape
    if not isinstance(shape, relax.ShapeExpr) or not all(isinstance(extent, tirx.IntImm) for extent in shape.values):
        return None
    return tuple(int(extent) for extent in shape.values), str(arg.ty.dtype)
