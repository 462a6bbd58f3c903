"""Models whose products are all bfloat16: kernels that multiply pairs of it, without rounding more than the model does.

A CPU computes such a model in float32 (:mod:`mlc.graph.precision.widened`). But products of bfloat16 are exact in
float32, and some CPUs have instructions that add up pairs of them. What multiplies a weight there is a value that the
model rounds to bfloat16, so that a kernel may round it too, once::

    matmul(x: bf16, W: bf16)   -->   matmul(x: f32, W: f32)   -->   dense_bfloat(bf16(x), W)

That is a property of the whole model, an attribute of ``main``: a model that multiplies float32 as well is none of
these, since by its weight alone a product does not tell what its other operand was.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from tvm import relax

from mlc.graph.ir.halves import exact_in
from mlc.graph.ir.rewrite import bindings, dtype_of, op_name
from mlc.graph.kernels.bfloat import has_bfloat_dot
from mlc.options import CompileOptions
from mlc.target import Target

__all__ = ["OF_BFLOATS", "PRODUCTS", "TENSOR_PRODUCTS", "multiplies_bfloats", "reads_bfloats"]

#: attribute of ``main``: the model's products are of bfloat16
OF_BFLOATS = "mlc.products_of_bfloats"
#: sums of products, whose operands dot products and tensor cores take as they are
PRODUCTS = frozenset({"relax.matmul", "relax.nn.conv1d", "relax.nn.conv2d", "relax.nn.conv3d"})
#: those and what GPUs compute as such
TENSOR_PRODUCTS = PRODUCTS | {"relax.nn.conv1d_transpose", "relax.nn.conv2d_transpose"}


def multiplies_bfloats(func: relax.Function) -> bool:
    """Whether a function as the model spells it has products of bfloat16, and of no other floats."""
    calls = (b.value for b in bindings(func) if isinstance(b.value, relax.Call) and op_name(b.value) in PRODUCTS)
    types = {dtype_of(arg) for call in calls for arg in call.args}
    return {kind for kind in types if "float" in kind} == {"bfloat16"}


def reads_bfloats(func: relax.Function, target: Target, options: CompileOptions) -> Callable[[np.ndarray], bool]:
    """Whether a product of float32 with this weight shall be one of bfloat16: with precision ``bf16`` any, else those
    of such a model whose weight bfloat16 holds."""
    if options.precision == "bf16":
        return lambda weight: True
    if OF_BFLOATS not in (func.attrs or {}) or not has_bfloat_dot(target):
        return lambda weight: False
    return partial(exact_in, "bfloat16")
