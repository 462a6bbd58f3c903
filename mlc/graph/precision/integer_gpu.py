"""The cost of 8-bit products on GPUs: int8 on tensor cores, or floats.

By arithmetic on what data sheets say, of products as a whole: whichever of multiplying and of moving bytes takes
longer. Floats are what the ``precision`` of the options allows, and are read from where a kernel has put them that
reads the integers.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from tvm import relax

from mlc.graph.ir.rewrite import op_name, shape_of
from mlc.options import CompileOptions
from mlc.target import Target
from schedules.cuda.warp_tile import fills_tiles
from schedules.intrin import mma, select
from schedules.machine import gpu_machine

__all__ = ["on_tensor_cores", "priced_on_gpu"]

_KIND = next(kind for kind in mma.KINDS if kind.operand == "int8")
#: bytes of what floats are multiplied as, and whether tensor cores do
_FLOATS = {"f32": (4, False), "tf32": (4, True), "f16": (2, True), "bf16": (2, True)}
#: channels of a group that one copy takes
_PIECE = 16


def on_tensor_cores(target: Target) -> Callable[[relax.Call], bool]:
    """Whether :class:`schedules.cuda.mma.TensorCoreGemm` takes a product with a constant, both of int8."""
    available = select(mma.product(_KIND), target.tvm) is not None

    def takes(call: relax.Call) -> bool:
        if op_name(call) == "relax.nn.conv2d_transpose":
            return False
        rows, columns, depth, groups = _sizes(call)
        if not available or not fills_tiles(rows, columns, depth, _KIND):
            return False
        return groups == 1 or not shape_of(call.args[1])[1] % _PIECE

    return takes


def priced_on_gpu(target: Target, options: CompileOptions) -> Callable[[relax.Call], bool]:
    """Whether a product with a constant, both of dequantised integers, is faster as one of int8 on tensor cores than as
    one of floats; those that :class:`schedules.cuda.mma.TensorCoreGemm` does not take are not."""
    gpu, takes = gpu_machine(target.tvm), on_tensor_cores(target)
    size, by_tensor_cores = _FLOATS[options.precision]
    rate = gpu.tensor_flops(8 * size) if by_tensor_cores else gpu.flops

    def worth(call: relax.Call) -> bool:
        if not takes(call):
            return False
        rows, columns, depth, groups = _sizes(call)
        operations = 2.0 * rows * columns * depth * groups
        data, weight, result = (float(prod(shape_of(each))) for each in (*call.args, call))
        elements = data + weight + result
        integers = max(operations / gpu.tensor_flops(8), elements / gpu.memory_rate)
        floats = max(operations / rate, size * elements / gpu.memory_rate) + (1 + size) * data / gpu.memory_rate
        return integers <= floats

    return worth


def _sizes(call: relax.Call) -> tuple[int, int, int, int]:
    """``m``, ``n`` and ``k`` of a product, and how many of them a convolution is."""
    result, weight = shape_of(call), shape_of(call.args[1])
    if op_name(call) == "relax.matmul":
        return prod(result[:-1]), result[-1], weight[-2], 1
    groups = int(call.attrs.groups)
    return prod((result[0], *result[2:])), result[1] // groups, prod(weight[1:]), groups
