"""Pointwise arithmetic on GPUs, of each type of floats: the compiler takes it, and the emulator computes it right."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.special
import tvm
from tvm import te, tirx, topi

from mlc.codegen.cuda import keeping_nan, nvcc
from mlc.codegen.inspection import find_nvdisasm, kernels
from mlc.measure.data import numpy_dtype
from mlc.target import resolve
from mlc.testing import cuda_emulator
from schedules import registry
from schedules.cuda.arithmetic import vectorising
from schedules.space import best_seed

FLOATS = ("float16", "bfloat16", "float32")
#: of which a result may be so much of itself away
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 4e-7}

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator is compiled with g++")

#: functions of one number: how they are written, the reference, and where they are looked at
UNARY: dict[str, tuple[Callable[[Any], Any], Callable[[np.ndarray], np.ndarray], tuple[float, float]]] = {
    "abs": (tirx.abs, np.abs, (-9, 9)),
    "acos": (tirx.acos, np.arccos, (-0.9, 0.9)),
    "acosh": (tirx.acosh, np.arccosh, (1.1, 9)),
    "asin": (tirx.asin, np.arcsin, (-0.9, 0.9)),
    "asinh": (tirx.asinh, np.arcsinh, (-9, 9)),
    "atan": (tirx.atan, np.arctan, (-9, 9)),
    "atanh": (tirx.atanh, np.arctanh, (-0.9, 0.9)),
    "ceil": (tirx.ceil, np.ceil, (-9, 9)),
    "cos": (tirx.cos, np.cos, (-9, 9)),
    "cosh": (tirx.cosh, np.cosh, (-9, 9)),
    "erf": (tirx.erf, scipy.special.erf, (-4, 4)),
    "exp": (tirx.exp, np.exp, (-9, 9)),
    "exp2": (tirx.exp2, np.exp2, (-9, 9)),
    "floor": (tirx.floor, np.floor, (-9, 9)),
    "log": (tirx.log, np.log, (0.1, 9)),
    "log10": (tirx.log10, np.log10, (0.1, 9)),
    "log1p": (tirx.log1p, np.log1p, (-0.9, 9)),
    "log2": (tirx.log2, np.log2, (0.1, 9)),
    "nearbyint": (tirx.nearbyint, np.rint, (-9, 9)),
    "round": (tirx.round, np.rint, (-9, 9)),
    "rsqrt": (tirx.rsqrt, lambda x: 1 / np.sqrt(x), (0.1, 9)),
    "sigmoid": (tirx.sigmoid, scipy.special.expit, (-9, 9)),
    "sin": (tirx.sin, np.sin, (-9, 9)),
    "sinh": (tirx.sinh, np.sinh, (-9, 9)),
    "sqrt": (tirx.sqrt, np.sqrt, (0.1, 9)),
    "tan": (tirx.tan, np.tan, (-1.4, 1.4)),
    "tanh": (tirx.tanh, np.tanh, (-4, 4)),
    "trunc": (tirx.trunc, np.trunc, (-9, 9)),
}
#: functions of a number from 0.1 to 9 and one from -3 to 3
BINARY: dict[str, tuple[Callable[[Any, Any], Any], Callable[[np.ndarray, np.ndarray], np.ndarray]]] = {
    "atan2": (tirx.atan2, np.arctan2),
    "copysign": (tirx.copysign, np.copysign),
    "divide": (lambda x, y: x / y, np.divide),
    "fmod": (tirx.fmod, np.fmod),
    "hypot": (tirx.hypot, np.hypot),
    "max": (tirx.max, np.maximum),
    "min": (tirx.min, np.minimum),
    "pow": (lambda x, y: tirx.call_intrin(x.ty, "tirx.pow", x, y), np.power),
    "select": (lambda x, y: tirx.Select(x < y, x, y), np.minimum),
}
CASTS = ("float16", "bfloat16", "float32", "float64", "bool", "int8", "uint8", "int16", "int32", "int64", "uint32")


def pointwise(dtype: str, shape: tuple[int, ...] = (64,)) -> tirx.PrimFunc:
    """All of :data:`UNARY` of an input of each, :data:`BINARY` of two, and casts of one from and to each type."""
    inputs = {name: te.placeholder(shape, dtype, f"x_{name}") for name in UNARY}
    left, right = te.placeholder(shape, dtype, "left"), te.placeholder(shape, dtype, "right")
    given = {other: te.placeholder(shape, other, f"given_{other}") for other in CASTS if other != dtype}

    def computed(name: str, function: Callable[..., Any], *tensors: te.Tensor) -> te.Tensor:
        return te.compute(shape, lambda *i: function(*(tensor(*i) for tensor in tensors)), name=name)

    results = [
        *(computed(name, f, inputs[name]) for name, (f, _, _) in UNARY.items()),
        *(computed(name, f, left, right) for name, (f, _) in BINARY.items()),
        *(topi.cast(left, other) for other in CASTS if other != dtype),
        *(topi.cast(tensor, dtype) for tensor in given.values()),
    ]
    return te.create_prim_func([*inputs.values(), left, right, *given.values(), *results])


def written(func: tirx.PrimFunc, target: tvm.target.Target) -> str:
    return cuda_emulator.cuda_source(best_seed(registry.find(func, target), func, target).mod["main"], target)


@needs_nvcc
@pytest.mark.sampled(9)
@pytest.mark.parametrize("shape", [(64,), (4096, 1024)], ids=["few", "many"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_75"])
def test_the_compiler_takes_every_pointwise_function(arch: str, dtype: str, shape: tuple[int, ...]) -> None:
    target = resolve(f"cuda:{arch}").tvm
    assert nvcc(written(pointwise(dtype, shape), target), [arch])


def numbers(rng: np.random.Generator, dtype: str, low: float, high: float) -> np.ndarray:
    """Of the type, with halves and whole numbers among them."""
    values = rng.uniform(low, high, 64)
    values[::4] = np.clip(np.round(values[::4] * 2) / 2, low, high)
    return values.astype(numpy_dtype(dtype))


@needs_gxx
@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_pointwise_function_is_rounded_once(dtype: str) -> None:
    rng, target = np.random.default_rng(7), resolve("cuda:sm_80").tvm
    func = pointwise(dtype)
    inputs = [numbers(rng, dtype, *interval) for _, _, interval in UNARY.values()]
    left, right = numbers(rng, dtype, 0.1, 9), numbers(rng, dtype, -3, 3)
    right[::4] += right.dtype.type(0.25)  # no divisor is zero
    given = {other: rng.integers(0, 2 if other == "bool" else 100, 64).astype(numpy_dtype(other))
             for other in CASTS if other != dtype}
    inputs += [left, right, *given.values()]
    outputs = [np.zeros(64, numpy_dtype(str(p.dtype))) for p in func.params[len(inputs):]]
    scheduled = best_seed(registry.find(func, target), func, target).mod["main"]
    cuda_emulator.run(scheduled, target, inputs, outputs)
    wide = [x.astype("float64") for x in inputs]
    wanted = {
        **{name: f(x) for (name, (_, f, _)), x in zip(UNARY.items(), wide, strict=False)},
        **{name: f(*wide[len(UNARY):len(UNARY) + 2]) for name, (_, f) in BINARY.items()},
        **{f"to {other}": left.astype(numpy_dtype(other)).astype("float64") for other in given},
        **{f"from {other}": array.astype("float64") for other, array in given.items()},
    }
    assert len(wanted) == len(outputs)
    for (name, want), got in zip(wanted.items(), outputs, strict=True):
        bound = 0.0 if name.startswith("to") else ROUNDING[dtype]
        away = np.abs(got.astype("float64") - want)
        assert np.all(away <= bound * np.abs(want) * 1.01), (name, got, want)


@needs_gxx
@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOATS)
def test_extrema_are_nan_where_either_side_is(dtype: str) -> None:
    x, y = (te.placeholder((6,), dtype, name) for name in ("x", "y"))
    func = te.create_prim_func([x, y, topi.maximum(x, y), topi.minimum(x, y), topi.nn.relu(x), topi.clip(x, -1.0, 1.0)])
    target = resolve("cuda:sm_80").tvm
    nan, inf = np.nan, np.inf
    inputs = [np.array(v, numpy_dtype(dtype)) for v in ([nan, 1, nan, -inf, 2, -2], [1, nan, nan, 3, -inf, -1])]
    outputs = [np.zeros(6, numpy_dtype(dtype)) for _ in range(4)]
    scheduled = best_seed(registry.find(func, target), func, target).mod["main"]
    cuda_emulator.run(scheduled, target, inputs, outputs)
    left, right = (a.astype("float64") for a in inputs)
    for got, want in zip(outputs, [np.maximum(left, right), np.minimum(left, right), np.maximum(left, 0),
                                   np.clip(left, -1, 1)], strict=True):
        np.testing.assert_array_equal(got.astype("float64"), want)


@needs_nvcc
def test_extrema_that_keep_nan_are_one_instruction() -> None:
    x = te.placeholder((1024,), "float32", "x")
    func = te.create_prim_func([x, topi.clip(x, -1.0, 1.0)])
    (kernel,) = kernels(written(func, resolve("cuda:sm_80").tvm), "sm_80")
    if find_nvdisasm():
        assert kernel.count("FMNMX.NAN") == 2 and not kernel.count("FSETP") and not kernel.count("FSEL")


def gelu(dtype: str) -> tirx.PrimFunc:
    """In float32, of what is kept in ``dtype``."""
    x = te.placeholder((4096, 1024), dtype, "x")

    def value(v: Any) -> Any:
        return v * 0.5 * (1.0 + tirx.erf(v * 0.7071067811865476))

    return te.create_prim_func([x, te.compute(x.shape, lambda *i: value(x(*i).astype("float32")).astype(dtype))])


@needs_nvcc
@pytest.mark.parametrize("dtype,bits", [("float16", "128"), pytest.param("float32", "128", marks=pytest.mark.slow)])
def test_functions_of_numbers_stand_between_accesses_of_vectors(dtype: str, bits: str) -> None:
    (kernel,) = kernels(written(gelu(dtype), resolve("cuda:sm_80").tvm), "sm_80")
    assert kernel.stack_bytes == kernel.spilled_bytes == 0
    if find_nvdisasm():
        assert kernel.count("STG") == kernel.count(f"STG.E.{bits}") == 1
        assert kernel.count("LDG") == kernel.count(f"LDG.E.{bits}") == 1


def test_functions_are_of_vectors_in_kernels_alone() -> None:
    """A CPU's library has no such functions, which another build of this process may call."""
    erf = tvm.ir.Op.get("tirx.erf")
    source = written(gelu("float32"), resolve("cuda:sm_80").tvm)
    assert "float4" in source and source.count("erff(") == 4
    assert not erf.get_attr("TVectorizable")
    with pytest.raises(ZeroDivisionError), vectorising():
        assert erf.get_attr("TVectorizable")
        _ = 1 / 0
    assert not erf.get_attr("TVectorizable")


def test_extrema_of_kernels_alone_are_renamed() -> None:
    source = 'int max(int);\n#endif\nint own;\nextern "C" __global__ void k() { int x_max(max(1, my.min(2))); }\n'
    kept = keeping_nan(source)
    assert kept.startswith("int max(int);\n#endif\n") and "int own;\nextern" in kept
    assert "x_max(nan_max(1, my.min(2)))" in kept and not re.search(r"nan_min\(\w+ a", kept)
    assert keeping_nan(kept.replace("nan_max(1", "f(1")) == kept.replace("nan_max(1", "f(1")
    assert keeping_nan("no kernel: max(1, 2)") == "no kernel: max(1, 2)"
