"""Inputs whose numbers decide shapes: constants where they are given, else code for each that comes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import parser

import mlc
from mlc.errors import InputError, UsageError, ValuesNeededError
from mlc.frontend.onnx_shape_inputs import decisive_inputs
from mlc.specialising import MOST_KEPT, SpecialisingExecutable

HEADER = '<ir_version: 10, opset_import: ["" : 19]>\n'
SUMS = parser.parse_model(HEADER + """sums (float[2, 3, 4] x, int64[n] axes, int64[2] sizes) => (float[a, b] y) {
  s = ReduceSum <keepdims = 0> (x, axes)
  y = Reshape (s, sizes)
}""")
X = np.random.default_rng(0).standard_normal((2, 3, 4), dtype="float32")


def test_they_are_found_through_arithmetic() -> None:
    model = parser.parse_model(HEADER + """found (float[2, 3] x, float[2, 3] other, int64 n, int64[1] m, float lo)
    => (float[a, b] y) {
      n1 = Unsqueeze (n, zero)
      all = Concat <axis = 0> (n1, m)
      r = Reshape (x, all)
      t = Shape (other)
      e = Expand (r, t)
      y = Clip (e, lo)
    }""".replace("Unsqueeze (n, zero)", "Reshape (n, one)").replace("=> (float[a, b] y) {",
                 "=> (float[a, b] y) <int64[1] one = {1}> {"))
    assert decisive_inputs(model) == ["n", "m"]


def test_what_data_decides_is_none() -> None:
    model = parser.parse_model(HEADER + """found (float[2, 3] x, int64[4, 2] y) => (float[a] z) {
      s = ReduceMax <keepdims = 0> (y)
      one = Constant <value = int64[1] {1}> ()
      n = Reshape (s, one)
      z = Reshape (x, n)
    }""")
    assert decisive_inputs(model) == []


def test_given_values_are_constants(tmp_path: Path) -> None:
    exe = mlc.compile(SUMS, log=False, values={"axes": [1], "sizes": [4, 2]})
    assert [spec.name for spec in exe.inputs] == ["x"]
    np.testing.assert_allclose(exe(X)[0], X.sum(1).reshape(4, 2), rtol=1e-5, atol=1e-6)
    exe.save(tmp_path / "sums.so")


def test_without_values_each_that_comes_is_compiled() -> None:
    exe = mlc.compile(SUMS, log=False)
    assert isinstance(exe, SpecialisingExecutable)
    assert exe.inputs == ("x", "axes", "sizes") and exe.decisive == ("axes", "sizes")
    for axes, sizes in (([1], [4, 2]), ([0, 2], [3, 1]), ([1], [4, 2])):
        (y,) = exe(X, np.array(axes), sizes=np.array(sizes))
        np.testing.assert_allclose(y, X.sum(tuple(axes)).reshape(sizes), rtol=1e-5, atol=1e-6)
    first = exe.compiled(axes=np.array([1]), sizes=np.array([4, 2]))
    assert exe.compiled(axes=np.array([1]), sizes=np.array([4, 2])) is first


def test_a_few_are_kept() -> None:
    built: list[int] = []

    def build(values, forms):
        built.append(int(values["n"]))
        return object()

    exe = SpecialisingExecutable("m", ["x", "n"], ["n"], build)
    for n in (*range(MOST_KEPT + 1), 1, 0):
        exe.compiled(n=n)
    assert built == [*range(MOST_KEPT + 1), 0]


@pytest.mark.parametrize(("values", "message"), [
    ({"axes": [1]}, "depend on the values of its inputs sizes; give them: --value sizes="),
    ({"axes": [1], "sizes": [4, 2], "z": [1]}, "values must name inputs of sums"),
    ({"axes": [0.5], "sizes": [4, 2]}, r"values\['axes'\] of sums must be int64"),
    ({"axes": [1], "sizes": [4]}, r"of the shape \(2\)"),
    ({"axes": "one", "sizes": [4, 2]}, "must be int64"),
])
def test_wrong_values_are_one_line(values: dict, message: str) -> None:
    with pytest.raises((UsageError, ValuesNeededError), match=message) as refused:
        mlc.compile(SUMS, log=False, values=values)
    assert "\n" not in str(refused.value)


def test_what_has_no_code_cannot_be_saved(tmp_path: Path) -> None:
    exe = mlc.compile(SUMS, log=False)
    with pytest.raises(UsageError, match=r"save exe.compiled\(axes=..., sizes=...\)"):
        exe.save(tmp_path / "no.so")
    with pytest.raises(InputError, match="takes x, axes, sizes"):
        exe(X)
