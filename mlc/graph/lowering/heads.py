"""Products of halves that read their operands, and write their results, where transposes would have them from.

``permute_dims(matmul(permute_dims(x), permute_dims(y)))``   -->   one ``call_tir`` of ``x`` and ``y``

On GPUs, of the heads of an attention that is quantised at every step, which no kernel computes as a whole. What is
elementwise between the product and the transpose of its result moves behind the transpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import tvm
from tvm import relax, te

from mlc.graph.ir.constants import scalar_of
from mlc.graph.ir.movement import permutation
from mlc.graph.ir.patterns import PRODUCT
from mlc.graph.ir.rewrite import Scope, dtype_of, op_name, rebuilt, rewrite, shape_of
from mlc.graph.ir.views import Graph
from mlc.operators import relax_where
from mlc.target import Target

__all__ = ["PlaceHeads"]

_UNARY = {*relax_where(lambda each: each.pointwise and each.arity == 1), "quantize", "dequantize"}


def PlaceHeads(target: Target) -> tvm.transform.Pass:
    """Module pass over operators: on GPUs, no transpose is left around batched products of float16."""

    @tvm.transform.module_pass(opt_level=0, name="PlaceHeads")
    def run(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        if target.kind != "cuda":
            return mod
        return _placed(rewrite(mod, {"relax.permute_dims": (_before_elementwise,)}))

    return run


def _is_product(value: relax.Expr | None) -> bool:
    if not isinstance(value, relax.Call) or op_name(value) != "relax.matmul" or dtype_of(value) != "float32":
        return False
    left, right = map(shape_of, value.args)
    return all(dtype_of(arg) == "float16" and isinstance(arg, relax.Var) for arg in value.args) and (
        len(left) > 2 and left[:-2] == right[:-2])


def _before_elementwise(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``permute_dims(f(x)) --> f(permute_dims(x))`` where ``f`` leads to a product that nothing else reads."""
    if not _leads_to_product(call.args[0], scope):
        return None
    value = scope.value(call.args[0])
    if op_name(value) == "relax.matmul":
        return None
    moved = scope.emit(relax.Call(call.op, [value.args[0]], call.attrs, call.ty_args))
    return relax.Call(value.op, [moved, *value.args[1:]], value.attrs, value.ty_args)


def _leads_to_product(expr: relax.Expr, scope: Scope) -> bool:
    value = scope.value(expr)
    if not isinstance(value, relax.Call) or not scope.once(expr):
        return False
    if _is_product(value):
        return True
    name = op_name(value).removeprefix("relax.")
    scaled = name in ("multiply", "divide") and scalar_of(value.args[1]) is not None and not shape_of(value.args[1])
    single = name in _UNARY and all(not shape_of(arg) for arg in value.args[1:] if isinstance(arg.ty, relax.TensorType))
    return (scaled or single) and _leads_to_product(value.args[0], scope)


def _placed(mod: tvm.IRModule) -> tvm.IRModule:
    graph = Graph(mod["main"])
    orders: dict[relax.Var, list[int]] = {}
    for var, value in graph.bound.items():
        if _is_product(value):
            reader = graph.reader(var)
            turned = graph.call(reader, "permute_dims") if reader is not None else None
            if turned is not None:
                orders[reader] = permutation(turned)
            elif any(graph.call(arg, "permute_dims") is not None for arg in value.args):
                orders[var] = list(range(len(shape_of(value))))
    if not orders:
        return mod
    image: dict[relax.Var, relax.Expr] = {param: param for param in mod["main"].params}

    def source(arg: relax.Var) -> tuple[relax.Expr, list[int]]:
        """What an operand is transposed from, by which axes."""
        turned = graph.call(arg, "permute_dims")
        if turned is None:
            return image[arg], list(range(len(shape_of(arg))))
        return image[turned.args[0]], permutation(turned)

    def change(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr:
        if var not in orders:
            return value
        own = graph.bound[var]
        product = own if op_name(own) == "relax.matmul" else graph.bound[own.args[0]]
        (x, left), (y, right) = map(source, product.args)
        function = partial(_product, left=left, right=right, order=orders[var])
        return builder.call_te(function, x, y, primfunc_name_hint="matmul", primfunc_attrs={"op_pattern": PRODUCT})

    return relax.transform.DeadCodeElimination()(rebuilt(mod, graph.bound, change, image=image))


def _product(
    x: te.Tensor, y: te.Tensor, left: Sequence[int], right: Sequence[int], order: Sequence[int]
) -> te.Tensor:
    """float32 ``transpose(transpose(x, left) @ transpose(y, right), order)`` of float16, ``[..., M, K]`` and
    ``[..., K, N]`` when they are transposed."""
    *batch, rows, depth = (x.shape[axis] for axis in left)
    shape = [*batch, rows, y.shape[right[-1]]]
    k = te.reduce_axis((0, depth), name="k")

    def element(*place: tvm.tirx.Var) -> tvm.tirx.PrimExpr:
        *front, row, column = (place[order.index(axis)] for axis in range(len(shape)))
        a, b = (*front, row, k), (*front, k, column)
        one, other = (
            tensor(*(point[axes.index(axis)] for axis in range(len(shape)))).astype("float32")
            for tensor, point, axes in ((x, a, left), (y, b, right)))
        return te.sum(one * other, axis=k)

    return te.compute([shape[axis] for axis in order], element, name="matmul")
