"""Largest and least elements, infinite ones among them."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from onnx import parser

import mlc
from mlc.testing.targets import runs

RNG = np.random.default_rng(0)


def model(operator: str, shape: tuple[int, ...], axes: list[int]) -> object:
    result = f"float[{','.join('abc'[:len(shape) - len(axes)])}]" if len(shape) > len(axes) else "float"
    return parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 20]> g (float[{",".join(map(str, shape))}] x) => ({result} y) '
        f'<int64[{len(axes)}] axes = {{{",".join(map(str, axes))}}}> {{ y = {operator} <keepdims = 0> (x, axes) }}')


@pytest.mark.parametrize("target", ["native", pytest.param("x86-64-v3", marks=pytest.mark.skipif(
    not runs("x86-64-v3"), reason="this machine lacks AVX2"))])
@pytest.mark.parametrize(("operator", "shape", "axes"), [
    ("ReduceMax", (8, 1000), [1]), ("ReduceMin", (8, 1000), [1]), ("ReduceMax", (37, 64), [0]),
    ("ReduceMin", (5, 7, 9), [0, 2]), ("ReduceMax", (50000,), [0]),
])
def test_they_may_be_infinite(operator: str, shape: tuple[int, ...], axes: list[int], target: str) -> None:
    exe = mlc.compile(model(operator, shape, axes), target, log=False, values={})
    reduce, end = (np.max, -np.inf) if operator == "ReduceMax" else (np.min, np.inf)
    x = RNG.standard_normal(shape, dtype="float32")
    infinite = x.copy()
    infinite[tuple(slice(None) if axis in axes else 0 for axis in range(len(shape)))] = end
    for given in (x, infinite):
        np.testing.assert_array_equal(exe(given)[0], reduce(given, axis=tuple(axes)))
    assert np.isinf(exe(infinite)[0]).any()


def test_the_process_ends_well() -> None:
    """TVM frees its registry after Python has ended."""
    code = "from schedules.reducers import register; register(); register()"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
