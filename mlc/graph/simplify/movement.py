"""Reshapes, transposes and the like in a canonical form; two in a row are merged.

============================================  ====================================================
before                                        after
============================================  ====================================================
``expand_dims``, ``squeeze``, ``flatten``     ``reshape``
``reshape(reshape(x))``                       ``reshape(x)``
``permute_dims(permute_dims(x, p), q)``       ``permute_dims(x, p[q])``, nothing where they cancel
``permute_dims`` that moves unit axes only    ``reshape``
``split(x)[i]``                               ``strided_slice(x)``, which can be part of a kernel
============================================  ====================================================
"""

from __future__ import annotations

from tvm import relax
from tvm.relax import op

from mlc.graph.ir.movement import permutation
from mlc.graph.ir.rewrite import PROJECTION, Rules, Scope, rewrite_pass, shape_of
from mlc.graph.simplify.identities import same_order, same_shape

__all__ = ["MergeMovement"]


def as_reshape(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``squeeze(x) --> reshape(x)`` and the like."""
    return op.reshape(call.args[0], shape_of(call))


def merge_reshapes(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``reshape(reshape(x)) --> reshape(x)``."""
    inner = scope.call(call.args[0], "reshape")
    return op.reshape(inner.args[0], shape_of(call)) if inner is not None else None


def merge_transposes(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``permute_dims(permute_dims(x, p), q) --> permute_dims(x, p[q])``."""
    inner = scope.call(call.args[0], "permute_dims")
    if inner is None:
        return None
    first, second = permutation(inner), permutation(call)
    return op.permute_dims(inner.args[0], [first[axis] for axis in second])


def transpose_as_reshape(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``permute_dims(x) --> reshape(x)`` where axes longer than one keep their order."""
    shape = shape_of(call.args[0])
    moved = [axis for axis in permutation(call) if shape[axis] != 1]
    return op.reshape(call.args[0], shape_of(call)) if moved == sorted(moved) else None


def slice_of_split(item: relax.TupleGetItem, scope: Scope) -> relax.Expr | None:
    """``split(x)[i] --> strided_slice(x)``."""
    split = scope.call(item.tuple_value, "split")
    if split is None:
        return None
    axis = int(split.attrs.axis) % len(shape_of(item))
    begin = sum(int(part.shape.values[axis]) for part in split.ty.fields[: item.index])
    return op.strided_slice(split.args[0], [axis], [begin], [begin + shape_of(item)[axis]])


RULES: Rules = {
    PROJECTION: (slice_of_split,),
    "relax.expand_dims": (as_reshape,),
    "relax.squeeze": (as_reshape,),
    "relax.flatten": (as_reshape,),
    "relax.nn.batch_flatten": (as_reshape,),
    "relax.reshape": (same_shape, merge_reshapes),
    "relax.permute_dims": (same_order, merge_transposes, transpose_as_reshape),
}

MergeMovement = rewrite_pass("MergeMovement", RULES)
