"""The node tests that come with the onnx package: right, or refused in one line; never something else.

Each is a model of one operator (``_expanded``: of its definition) with inputs and outputs of onnx's own. What is
refused is listed in ``refused_operators.txt``, so that a case that begins to work, or stops to, is told. An eighth of
the cases runs in ``make test``, all in ``make test-all``.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx.backend.test.case.test_case import TestCase as NodeTest

import mlc
from mlc.errors import MlcError

LISTED = Path(__file__).with_name("refused_operators.txt")
REFUSED = frozenset(
    line for line in LISTED.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")
)
#: cases whose results are known to differ, by what their names hold
DIFFERENT = {
    "resize_downsample_scales_linear_align_corners": "the size that was not rounded down, which onnxruntime rounds",
    "resize_downsample_scales_cubic_align_corners": "the same",
}
_PARTS = 8


@cache
def _cases() -> dict[str, NodeTest]:
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # onnx computes infinities for some of them
        return {case.name: case for case in collect_testcases(None)}


def _names() -> Iterator[object]:
    for name in _cases():
        quick = zlib.crc32(name.encode()) % _PARTS == 0
        yield pytest.param(name, id=name.removeprefix("test_"), marks=[] if quick else [pytest.mark.slow])


def _as_array(value: object) -> object:
    """The data of types that numpy lacks comes as a message."""
    if isinstance(value, list):
        return [_as_array(each) for each in value]
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value


def _run(case: NodeTest) -> list[object]:
    """The outputs, with nothing of the inputs known when the case is compiled; raises what mlc says of it."""
    (given, _), *_ = case.data_sets
    feeds = dict(zip((value.name for value in case.model.graph.input), map(_as_array, given), strict=False))
    return mlc.compile(case.model, log=False)(**feeds)


def _agree(got: Sequence[object], expected: Sequence[object], case: NodeTest) -> None:
    for ours, theirs in zip(got, map(_as_array, expected), strict=True):
        if isinstance(theirs, list):  # a sequence
            assert isinstance(ours, list)
            _agree(ours, theirs, case)
            continue
        theirs = np.asarray(theirs)
        assert isinstance(ours, np.ndarray)
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        if theirs.dtype.kind in "biu":
            np.testing.assert_array_equal(ours, theirs)
            continue
        places = {"float16": 4e-3, "bfloat16": 2e-2}.get(theirs.dtype.name, 1e-3)
        np.testing.assert_allclose(ours.astype("float64"), theirs.astype("float64"), rtol=max(case.rtol, places),
                                   atol=places * 1e-2)


@pytest.mark.parametrize("name", list(_names()))
def test_node(name: str) -> None:
    case = _cases()[name]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # how a defect of the substitutions is told
            got = _run(case)
    except MlcError as error:
        assert name in REFUSED, f"{name} is refused: {error}"
        assert "\n" not in str(error) and str(error)
        return
    assert name not in REFUSED, f"{name} works now; take it out of {LISTED.name}"
    (_, expected), *_ = case.data_sets
    assert len(got) == len(expected)
    if reason := next((why for part, why in DIFFERENT.items() if part in name), None):
        with pytest.raises(AssertionError):  # else it is right now: take it out of DIFFERENT
            _agree(got, expected, case)
        pytest.skip(reason)
    _agree(got, expected, case)


def test_what_is_listed_exists() -> None:
    assert not REFUSED - set(_cases())
