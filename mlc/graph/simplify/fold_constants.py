"""Constant folding.

The operators that importers leave on weights (reshape, transpose, cast, arithmetic) are evaluated by numpy with
one copy of the data; any other operator is lowered by TVM and run on the host. A result much larger than what it
is made of (a broadcast, a tile) stays an operator, since it costs less to make than to read.

Before: ``R.matmul(x, R.permute_dims(W, (1, 0)))``. After: ``R.matmul(x, W')``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tvm
from tvm import relax

from mlc.graph.ir.constants import array_of, constant, tensor_of
from mlc.graph.ir.rewrite import Scope, dtype_of, is_constant, op_name, rewrite_pass, shape_of
from mlc.operators import OPERATORS

__all__ = ["FoldConstants"]

#: a folded result may be this many times larger than its arguments ...
_GROWTH = 4
#: ... or of at most this many elements
_SMALL = 1 << 14

_Evaluator = Callable[..., np.ndarray]


def _reshaped(call: relax.Call, x: np.ndarray) -> np.ndarray:
    return x.reshape(shape_of(call))


def _transposed(call: relax.Call, x: np.ndarray) -> np.ndarray:
    axes = call.attrs.axes
    return x.transpose([int(a) for a in axes] if axes is not None else None)


def _elementwise(function: Callable[..., np.ndarray]) -> _Evaluator:
    return lambda _call, *arrays: function(*arrays)


NUMPY: dict[str, _Evaluator] = {
    **dict.fromkeys(
        ("relax.reshape", "relax.expand_dims", "relax.squeeze", "relax.flatten", "relax.nn.batch_flatten"), _reshaped
    ),
    "relax.permute_dims": _transposed,
    "relax.astype": lambda call, x: x.astype(dtype_of(call)),
    "relax.broadcast_to": lambda call, x: np.broadcast_to(x, shape_of(call)),
    **{f"relax.{each.relax.name}": _elementwise(each.numpy) for each in OPERATORS.values()
       if each.relax is not None and each.numpy is not None},
}

#: operators that are no functions of their arguments, or give other things than one tensor
_NEVER = {"relax.nn.dropout", "relax.multinomial_from_uniform", "relax.call_tir", "relax.call_packed"}


def fold(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``f(constants) --> constant``."""
    tensors = _constant_arguments(call, scope)
    if tensors is None or not isinstance(call.ty, relax.TensorType):
        return None
    elements = int(np.prod(shape_of(call), dtype=np.int64))
    if elements > max(_SMALL, _GROWTH * sum(array.size for array in tensors)):
        return None
    evaluator = NUMPY.get(op_name(call))
    if evaluator is None or not tensors:
        return evaluate(call)
    if evaluator is _reshaped and (tensor := tensor_of(call.args[0])) is not None:
        return relax.const(tensor._create_view(shape_of(call)))  # the same memory
    arrays = [array_of(arg) for arg in call.args if is_constant(arg)]
    with np.errstate(all="ignore"):
        return constant(evaluator(call, *arrays), dtype_of(call))


def _constant_arguments(call: relax.Call, scope: Scope) -> list[np.ndarray] | None:
    """The tensors among the arguments if all of them are constants that numpy can hold, else None."""
    arrays: list[np.ndarray] = []
    for arg in call.args:
        fields = scope.value(arg).fields if isinstance(scope.value(arg), relax.Tuple) else [arg]
        for field in fields:
            if isinstance(field.ty, relax.TensorType):
                array = array_of(field)
                if array is None:
                    return None
                arrays.append(array)
            elif isinstance(field, relax.Var):
                return None
    return arrays


def evaluate(call: relax.Call) -> relax.Expr | None:
    """Lower one call of constants by TVM and run it on the host; None where TVM cannot."""
    builder = relax.BlockBuilder()
    with builder.function("main", []):
        with builder.dataflow():
            result = builder.emit_output(call)
        builder.emit_func_output(result)
    passes = [relax.transform.LegalizeOps(), relax.transform.AnnotateTIROpPattern(), relax.transform.FoldConstant()]
    with tvm.target.Target("llvm"):
        main = tvm.transform.Sequential(passes)(builder.finalize())["main"]
    return main.body.body if array_of(main.body.body) is not None else None


FoldConstants = rewrite_pass("FoldConstants", {
    name: (fold,) for name in tvm.ir.Op.list_op_names() if name.startswith("relax.") and name not in _NEVER
})
