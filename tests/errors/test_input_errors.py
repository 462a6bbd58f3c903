"""Arrays that do not fit a compiled model: the line names the input, what it must be, what came, and the remedy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlc.artifact import Executable, ModelMeta, compile_module
from mlc.errors import InputError
from mlc.frontend.model import TensorSpec
from mlc.target import resolve
from mlc.testing.programs import dense, scalars

X = np.zeros((5, 24), np.float32)


@pytest.fixture(scope="module")
def one() -> Executable:
    meta = ModelMeta("m", (TensorSpec("data.0", (5, 24), "float32"),), (TensorSpec("y", (5, 24), "float32"),))
    return compile_module(dense().mod, resolve("native", threads=1), None, meta)


@pytest.fixture(scope="module")
def four() -> Executable:
    return compile_module(scalars().mod, resolve("native", threads=1))


def _line(exe: Executable, *arrays: Any, **named: Any) -> str:
    with pytest.raises(InputError) as caught:
        exe(*arrays, **named)
    with pytest.raises(InputError):
        exe.time(*arrays, **named)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_wrong_shape(one: Executable) -> None:
    assert _line(one, X[:4]) == (
        "input data.0 must have shape [5, 24], got [4, 24]; compile the model again for this shape")
    assert _line(one, X.T) == "input data.0 must have shape [5, 24], got [24, 5]; reshape it"
    assert "got [1, 5, 24]; reshape it" in _line(one, X[None])


def test_wrong_type(one: Executable) -> None:
    assert _line(one, X.astype(np.float64)) == (
        "input data.0 must be float32, got float64; convert it with .astype('float32')")
    assert "must be float32, got int64" in _line(one, X.astype(np.int64).tolist())
    assert "must be float32, got >f4" in _line(one, X.astype(">f4"))


def test_no_array_at_all(one: Executable) -> None:
    assert "must be float32, got object" in _line(one, None)
    assert "must be an array in this machine's memory, got list" in _line(one, [[1.0], [1.0, 2.0]])

    class Elsewhere:
        def __array__(self, *_: Any, **__: Any) -> np.ndarray:
            raise TypeError("it lies on a GPU")

    assert "got Elsewhere (it lies on a GPU); convert it to numpy" in _line(one, Elsewhere())


def test_unknown_name(one: Executable) -> None:
    assert _line(one, **{"data": X}) == "an input's name must be one of data.0, got data"


def test_missing_input(one: Executable, four: Executable) -> None:
    assert "but data.0 is missing; the model takes data.0: float32[5, 24]" in _line(one)
    assert "but scale, count.0, mask is missing" in _line(four, np.zeros(6, np.float32))


def test_too_many_inputs(one: Executable) -> None:
    assert _line(one, X, X) == "the model takes 1 inputs (data.0), got 2 arrays"


def test_an_input_given_twice(one: Executable) -> None:
    assert _line(one, X, **{"data.0": X}) == (
        "each input must be given once, but data.0 came by position and by name")


def test_a_failed_call_changes_nothing(one: Executable) -> None:
    _line(one, X[:4])
    x = np.random.default_rng(0).standard_normal((5, 24), dtype=np.float32)
    np.testing.assert_allclose(one(x)[0], dense().reference(x)[0], rtol=1e-5, atol=1e-5)
