"""Which numbers of a function are part of its key, and that all are part of what it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import tvm_ffi
from tvm import te, tirx

from mlc.graph.ir.immediates import without_immediates
from mlc.graph.task import Task, function_key, normalise, task_key
from mlc.target import resolve

TARGET = resolve("x86-64-v3", threads=1)
N = 24


def _function(body: Callable[..., Any], dtypes: tuple[str, ...] = ("float32",), extent: int = N) -> tirx.PrimFunc:
    """Elements of as many vectors, by ``body`` of an index and those."""
    given = [te.placeholder((N,), dtype, name=f"x{i}") for i, dtype in enumerate(dtypes)]
    return normalise(te.create_prim_func([*given, te.compute((extent,), lambda i: body(i, *given), name="y")]))


def _quantised(scale: float, zero: int, top: int = 255) -> tirx.PrimFunc:
    """``uint8 -> uint8``: an affine rescaling as residual additions of quantised models have it."""
    def body(i: tirx.Var, x: te.Tensor) -> Any:
        real = (x[i].astype("int32") - tirx.const(zero, "int32")).astype("float32") * tirx.const(scale, "float32")
        rounded = tirx.nearbyint(real / tirx.const(scale * 1.7, "float32")).astype("int32") + zero
        return tirx.max(tirx.min(rounded, tirx.const(top, "int32")), tirx.const(0, "int32")).astype("uint8")

    return _function(body, ("uint8",))


def _sum(start: float, factor: float) -> tirx.PrimFunc:
    k = te.reduce_axis((0, N), name="k")
    x = te.placeholder((8, N), "float32", name="x")
    add = te.comm_reducer(lambda a, b: a + b, lambda dtype: tirx.const(start, dtype), name="from")
    total = te.compute((8,), lambda i: add(x[i, k] * tirx.const(factor, "float32"), axis=k), name="total")
    return normalise(te.create_prim_func([x, total]))


#: two functions each that any schedule of one suits
ALIKE: dict[str, Callable[[int], tirx.PrimFunc]] = {
    "scales": lambda n: _quantised((0.037, 0.0021)[n], 7),
    "zero points": lambda n: _quantised(0.5, (3, 131)[n]),
    "bounds": lambda n: _quantised(0.5, 3, (255, 127)[n]),
    "padding": lambda n: _function(
        lambda i, x: tirx.if_then_else(i < N - 2, x[i], tirx.const((5, 9)[n], "uint8")), ("uint8",)),
    "chosen": lambda n: _function(
        lambda i, x: tirx.Select(x[i] > 0.5, x[i], x[i] * tirx.const((0.1, 0.2)[n], "float32"))),
    "inside calls": lambda n: _function(lambda i, x: tirx.exp(x[i] * tirx.const((0.125, 0.3)[n], "float32"))),
    "divisors": lambda n: _function(lambda i, x: x[i] / tirx.const((49.0, 64.0)[n], "float32")),
}

#: two functions each of which a schedule, or the code, may tell apart
UNLIKE: dict[str, Callable[[int], tirx.PrimFunc]] = {
    "signs": lambda n: _function(lambda i, x: x[i] * tirx.const((0.5, -0.5)[n], "float32")),
    "one": lambda n: _quantised((1.0, 0.37)[n], 3),
    "infinity": lambda n: _function(lambda i, x: tirx.max(x[i], tirx.const((-math.inf, -8.0)[n], "float32"))),
    "padded with zero": lambda n: _function(
        lambda i, x: tirx.if_then_else(i < N - 2, x[i], tirx.const((0, 9)[n], "uint8")), ("uint8",)),
    "conditions": lambda n: _function(lambda i, x: tirx.if_then_else(i < (5, 9)[n], x[i], x[i] * 2.0)),
    "places": lambda n: _function(lambda i, x: x[i + (2, 3)[n]], extent=N - 4),
    "strides": lambda n: _function(lambda i, x: x[i * (2, 3)[n]], extent=N // 3),
    "extents": lambda n: _function(lambda i, x: x[i] * 0.3, extent=(N, N - 1)[n]),
    "powers": lambda n: _function(lambda i, x: tirx.power(x[i], tirx.const((2.0, 0.5)[n], "float32"))),
    "types": lambda n: _function(lambda i, x: x[i] * tirx.const(3, ("int8", "int16")[n]), (("int8", "int16")[n],)),
    "quotients": lambda n: _function(lambda i, x: tirx.floordiv(x[i], (3, 4)[n]), ("int32",)),
    "what a sum begins with": lambda n: _sum((0.0, 3.0)[n], 1.0),
    "what is summed up": lambda n: _sum(0.0, (2.0, 3.0)[n]),
    "gathered places": lambda n: _function(lambda i, x, y: x[y[i] + (2, 3)[n]] * 0.5, ("float32", "int32")),
    "computed places": lambda n: _computed_places((2, 3)[n]),
}


def _computed_places(offset: int) -> tirx.PrimFunc:
    x, y = te.placeholder((N,), "float32", name="x"), te.placeholder((N,), "int32", name="y")
    at = te.compute((N,), lambda i: tirx.max(y[i] - offset, 0), name="at")
    return normalise(te.create_prim_func([x, y, te.compute((N,), lambda i: x[at[i]], name="z")]))


@pytest.mark.parametrize("name", ALIKE)
def test_numbers_that_are_mere_data_are_no_part_of_the_key(name: str) -> None:
    one, other = (Task("t", ALIKE[name](n), TARGET) for n in (0, 1))
    assert one.key == other.key
    assert one.identity != other.identity and len({one.key, one.identity, other.identity}) == 3
    assert one.keys == (one.key, one.identity) == (task_key(one.func, TARGET), function_key(one.func, TARGET))


@pytest.mark.parametrize("name", UNLIKE)
def test_all_others_are(name: str) -> None:
    one, other = (Task("t", UNLIKE[name](n), TARGET) for n in (0, 1))
    assert one.key != other.key and one.identity != other.identity


@pytest.mark.parametrize("func", [
    _function(lambda i, x: tirx.max(x[i], 0.0)), _function(lambda i, x, y: x[i] + y[i], ("float32", "float32")),
    _sum(0.0, 2.0),
])
def test_what_has_no_such_numbers_keeps_the_key_that_it_had(func: tirx.PrimFunc) -> None:
    task = Task("t", func, TARGET)
    assert without_immediates(func).same_as(func)
    assert task.keys == (task.key,) == (task.identity,)
    digest = tvm_ffi.structural_hash(func, map_free_vars=True) & (2**64 - 1)
    assert task.key.startswith(f"{digest:016x}-{TARGET.canonical}-")


def test_only_numbers_are_replaced() -> None:
    """What is hashed has the loops, blocks, tensors and types of the function."""
    func = _quantised(0.037, 131)
    masked = without_immediates(func)
    text = masked.script()
    assert "0.037" not in text and "131" not in text and "255" not in text
    assert [str(each.ty) for each in masked.params] == [str(each.ty) for each in func.params]
    assert without_immediates(masked).same_as(masked) or tvm_ffi.structural_equal(without_immediates(masked), masked)
    for word in ("for i", "T.nearbyint", "T.Cast(\"uint8\"", f"range({N})"):
        assert word in text, text
