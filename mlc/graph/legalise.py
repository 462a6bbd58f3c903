"""Every operator as a tensor function: TVM's own definitions, with faster transcendental functions on CPUs.

LLVM calls the C library once per element for ``exp``, ``erf`` and ``tanh``, 1 to 24 ns each; polynomials and rational
functions are vectorised and take 0.1 to 0.2 ns. Largest errors against double precision: ``exp`` 2e-7 relative,
``erf`` 4e-7 and ``tanh`` 3e-7 absolute. ``exp`` saturates at the border of the normal float32 numbers: 2.4e38 above
88.37, 1.2e-38 below -87.33.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import tvm
from tvm import relax, te, tirx, topi
from tvm.relax.transform import LegalizeOps

from mlc.graph.rewrite import dtype_of
from mlc.target import Target

__all__ = ["Legalise", "exp"]

_Legalisation = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]

_EXP_RANGE = (-87.33654, 88.37626)
#: ln 2 in two parts, the first with trailing zero bits, so that its small multiples are exact (Cody and Waite)
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
#: (exp(r) - 1 - r) / r^2 interpolated at the Chebyshev points of [-ln(2)/2, ln(2)/2], lowest power first; 1e-8
_EXP_TERMS = (0.5, 0.1666657698969885, 0.04166655461722592, 0.008363179052715136, 0.001392618358571737)


def exp(x: tirx.PrimExpr) -> tirx.PrimExpr:
    """``e ** x`` of a float32 expression by arithmetic alone: ``2 ** n * e ** r`` with ``|r| <= ln(2) / 2``."""
    low, high = (tirx.const(bound, "float32") for bound in _EXP_RANGE)
    x = tirx.max(tirx.min(x, high), low)
    n = tirx.floor(x * tirx.const(math.log2(math.e), "float32") + tirx.const(0.5, "float32"))
    r = (x - n * tirx.const(_LN2_HIGH, "float32")) - n * tirx.const(_LN2_LOW, "float32")
    terms = tirx.const(_EXP_TERMS[-1], "float32")
    for coefficient in reversed(_EXP_TERMS[:-1]):
        terms = terms * r + tirx.const(coefficient, "float32")
    mantissa = (terms * r * r + r) + tirx.const(1.0, "float32")
    power = tirx.reinterpret("float32", (n.astype("int32") + 127) << 23)
    return mantissa * power


def _elementwise(function: Callable[[tirx.PrimExpr], tirx.PrimExpr], name: str) -> Callable[[te.Tensor], te.Tensor]:
    return lambda x: te.compute(x.shape, lambda *i: function(x(*i)), name=name)


def _gelu(x: te.Tensor) -> te.Tensor:
    gate = topi.fast_erf(topi.multiply(x, math.sqrt(0.5)))
    return topi.multiply(x, topi.add(topi.multiply(gate, 0.5), 0.5))


def _gelu_tanh(x: te.Tensor) -> te.Tensor:
    cubic = topi.add(topi.multiply(topi.multiply(x, x), 0.044715), 1.0)
    gate = topi.fast_tanh(topi.multiply(topi.multiply(x, cubic), math.sqrt(2 / math.pi)))
    return topi.multiply(x, topi.add(topi.multiply(gate, 0.5), 0.5))


def _one() -> tirx.PrimExpr:
    return tirx.const(1.0, "float32")


#: float32 operators of one argument with a vectorised definition
FAST: dict[str, Callable[[te.Tensor], te.Tensor]] = {
    "relax.exp": _elementwise(exp, "exp"),
    "relax.erf": topi.fast_erf,
    "relax.tanh": topi.fast_tanh,
    "relax.sigmoid": _elementwise(lambda x: _one() / (_one() + exp(-x)), "sigmoid"),
    "relax.nn.silu": _elementwise(lambda x: x / (_one() + exp(-x)), "silu"),
    "relax.nn.gelu": _gelu,
    "relax.nn.gelu_tanh": _gelu_tanh,
}


def softmax(x: te.Tensor, axis: int) -> te.Tensor:
    """``exp(x - max) / sum`` along ``axis``: two reductions, each exponential computed once."""
    axis %= len(x.shape)
    rows = [dim for i, dim in enumerate(x.shape) if i != axis]

    def along(row: tuple[tirx.Var, ...], k: tirx.Var) -> tuple[tirx.Var, ...]:
        return (*row[:axis], k, *row[axis:])

    def row_of(i: tuple[tirx.Var, ...]) -> tuple[tirx.Var, ...]:
        return (*i[:axis], *i[axis + 1 :])

    k = te.reduce_axis((0, x.shape[axis]), name="k")
    peak = te.compute(rows, lambda *r: te.max(x(*along(r, k)), axis=k), name="softmax_max")
    powers = te.compute(x.shape, lambda *i: exp(x(*i) - peak(*row_of(i))), name="softmax_exp")
    j = te.reduce_axis((0, x.shape[axis]), name="k")
    total = te.compute(rows, lambda *r: te.sum(powers(*along(r, j)), axis=j), name="softmax_sum")
    return te.compute(x.shape, lambda *i: powers(*i) / total(*row_of(i)), name="softmax_norm")


def _own(name: str) -> Callable[[relax.BlockBuilder, relax.Call], relax.Expr]:
    return tvm.ir.Op.get(name).get_attr("FLegalize")


def _fast(name: str) -> _Legalisation:
    def legalise(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        if dtype_of(call) != "float32":
            return _own(name)(builder, call)
        return builder.call_te(FAST[name], call.args[0], primfunc_name_hint=name.rpartition(".")[2])

    return legalise


def _softmax(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    if dtype_of(call) != "float32":
        return _own("relax.nn.softmax")(builder, call)
    return builder.call_te(softmax, call.args[0], int(call.attrs.axis), primfunc_name_hint="softmax")


def Legalise(target: Target) -> tvm.transform.Pass:
    """Module pass: all operators but ``reshape``, which stays a view, become calls of tensor functions."""
    custom: dict[str, _Legalisation] = {}
    if target.kind == "llvm":
        custom = {name: _fast(name) for name in FAST} | {"relax.nn.softmax": _softmax}
    return LegalizeOps(custom, skip_ops=["relax.reshape"])
