"""Folds arithmetic on shapes that importers leave in a module into constants.

TVM's converters normalise a negative index with ``take(shape_to_tensor(shape_of(data)), axis)`` even where ``data`` is
static; compiled, that is a chain of tiny kernels on the hot path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mlc.frontend.onnx_values import array_of

if TYPE_CHECKING:
    import tvm

__all__ = ["fold_shapes"]

_LARGEST = 64  # elements: beyond this it is data, and the graph's constant folding decides


def fold_shapes(mod: tvm.IRModule) -> tvm.IRModule:
    """``take(shape_to_tensor(shape_of(x)), 1)`` --> ``const(x.shape[1])``, and what follows from it alone."""
    from tvm import relax

    folder = _folder_class()(mod)
    for variable, function in mod.functions_items():
        if isinstance(function, relax.Function):
            folder.builder_.update_func(variable, folder.visit_expr(function))
    return relax.transform.DeadCodeElimination()(folder.builder_.get())


Lookup = Callable[[Any], "np.ndarray | None"]


def _shape_of(call: Any, _: Lookup) -> Any:
    return call.args[0].ty.shape


def _shape_to_tensor(call: Any, _: Lookup) -> np.ndarray | None:
    import tvm
    from tvm import relax

    shape = call.args[0]
    known = isinstance(shape, relax.ShapeExpr) and all(isinstance(v, tvm.tirx.IntImm) for v in shape.values)
    return np.array([int(v) for v in shape.values], dtype=np.int64) if known else None


def _take(call: Any, array_of: Lookup) -> np.ndarray | None:
    data, indices = array_of(call.args[0]), array_of(call.args[1])
    if data is None or indices is None:
        return None
    axis = None if call.attrs.axis is None else int(call.attrs.axis)
    return np.asarray(np.take(data, indices, axis=axis, mode="wrap"))


def _strided_slice(call: Any, array_of: Lookup) -> np.ndarray | None:
    data = array_of(call.args[0])
    if data is None:
        return None
    axes, begin, end, *rest = ([int(v) for v in bounds.fields] for bounds in call.args[1:])
    index = [slice(None)] * data.ndim
    for axis, first, last, stride in zip(axes, begin, end, rest[0] if rest else [1] * len(axes), strict=True):
        index[axis] = slice(first, last, stride)
    return np.asarray(data[tuple(index)])


def _astype(call: Any, array_of: Lookup) -> np.ndarray | None:
    data = array_of(call.args[0])
    return None if data is None else data.astype(str(call.attrs.dtype))


_RULES: dict[str, Callable[[Any, Lookup], Any]] = {
    "relax.shape_of": _shape_of,
    "relax.shape_to_tensor": _shape_to_tensor,
    "relax.take": _take,
    "relax.strided_slice": _strided_slice,
    "relax.astype": _astype,
}


def _folder_class() -> Any:
    import tvm
    from tvm import relax

    @relax.expr_functor.mutator
    class Folder(relax.PyExprMutator):
        def visit_call_(self, call: Any) -> Any:
            call = self.visit_expr_post_order(call)
            args = [self.known(arg) for arg in call.args]
            if any(not a.same_as(b) for a, b in zip(args, call.args, strict=True)):
                call = self.builder_.normalize(relax.Call(call.op, args, call.attrs, call.ty_args, call.span))
            rule = _RULES.get(getattr(call.op, "name", ""))
            result = rule(call, self.array) if rule else None
            if isinstance(result, np.ndarray):
                return relax.const(result, str(result.dtype))
            return call if result is None else result

        def known(self, expr: Any) -> Any:
            """The constant or static shape that a variable stands for, else the expression itself."""
            bound = self.lookup_binding(expr) if isinstance(expr, relax.Var) else None
            return bound if isinstance(bound, tvm.ir.GenericConst | relax.ShapeExpr) else expr

        def array(self, expr: Any) -> np.ndarray | None:
            array = array_of(expr)
            return array if array is not None and array.size <= _LARGEST and array.dtype.kind in "biu" else None

    return Folder
