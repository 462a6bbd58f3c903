"""Every operator as a tensor function: TVM's own definitions, with faster transcendental functions on CPUs.

LLVM calls the C library once per element for ``exp``, ``erf`` and ``tanh``, 1 to 24 ns each; the polynomials and
rational functions of TOPI's fast math are vectorised and take 0.1 to 0.2 ns. Their largest errors, against double
precision: ``exp`` 1e-7 relative, ``erf`` 4e-7 and ``tanh`` 3e-7 absolute, which is the rounding of float32. Arguments
beyond the range of float32 saturate: ``exp`` of anything above 88.37 is 2.4e38, below -88.37 it is 4e-39.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import tvm
from tvm import relax, te, topi
from tvm.relax.transform import LegalizeOps

from mlc.graph.rewrite import dtype_of
from mlc.target import Target

__all__ = ["Legalise"]

_Legalisation = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]


def _sigmoid(x: te.Tensor) -> te.Tensor:
    return topi.divide(1.0, topi.add(topi.fast_exp(topi.negative(x)), 1.0))


def _silu(x: te.Tensor) -> te.Tensor:
    return topi.divide(x, topi.add(topi.fast_exp(topi.negative(x)), 1.0))


def _gelu(x: te.Tensor) -> te.Tensor:
    gate = topi.fast_erf(topi.multiply(x, math.sqrt(0.5)))
    return topi.multiply(x, topi.add(topi.multiply(gate, 0.5), 0.5))


def _gelu_tanh(x: te.Tensor) -> te.Tensor:
    cubic = topi.add(topi.multiply(topi.multiply(x, x), 0.044715), 1.0)
    gate = topi.fast_tanh(topi.multiply(topi.multiply(x, cubic), math.sqrt(2 / math.pi)))
    return topi.multiply(x, topi.add(topi.multiply(gate, 0.5), 0.5))


#: float32 operators of one argument with a vectorised definition, and the name of their function
FAST: dict[str, Callable[[te.Tensor], te.Tensor]] = {
    "relax.exp": topi.fast_exp,
    "relax.erf": topi.fast_erf,
    "relax.tanh": topi.fast_tanh,
    "relax.sigmoid": _sigmoid,
    "relax.nn.silu": _silu,
    "relax.nn.gelu": _gelu,
    "relax.nn.gelu_tanh": _gelu_tanh,
}


def _fast(name: str) -> _Legalisation:
    def legalise(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        if dtype_of(call) != "float32":
            return tvm.ir.Op.get(name).get_attr("FLegalize")(builder, call)
        return builder.call_te(FAST[name], call.args[0], primfunc_name_hint=name.rpartition(".")[2])

    return legalise


def _softmax(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    if dtype_of(call) != "float32":
        return tvm.ir.Op.get("relax.nn.softmax").get_attr("FLegalize")(builder, call)
    return builder.call_te(topi.nn.fast_softmax, call.args[0], axis=int(call.attrs.axis), primfunc_name_hint="softmax")


def Legalise(target: Target) -> tvm.transform.Pass:
    """Module pass: all operators but ``reshape``, which stays a view, become calls of tensor functions."""
    custom: dict[str, _Legalisation] = {}
    if target.kind == "llvm":
        custom = {name: _fast(name) for name in FAST} | {"relax.nn.softmax": _softmax}
    return LegalizeOps(custom, skip_ops=["relax.reshape"])
