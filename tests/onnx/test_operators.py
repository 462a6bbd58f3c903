"""The node tests that come with the onnx package: right, or refused in one line; never something else.

Each is a model of one operator (``_expanded``: of its definition) with inputs and outputs of onnx's own. What is
refused is listed in ``refused_operators.txt``, so that a case that begins to work, or stops to, is told. An eighth of
the cases of some modules of onnx's runs in ``make test``, all in ``make test-all``.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx.backend.test.case import node
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
#: of a module's cases, all together; those of attention take longest
_SECONDS = 3600
#: where onnx defines its cases, an operator or a few to a module: an import of one computes what its cases expect
MODULES = sorted(each.name.removeprefix(f"{node.__name__}.")
                 for each in walk_packages(node.__path__, f"{node.__name__}.") if not each.ispkg)


@cache
def _cases(module: str) -> dict[str, NodeTest]:
    known = len(node._NodeTestCases)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # onnx computes infinities for some of them
        import_module(f"{node.__name__}.{module}")
    return {case.name: case for case in node._NodeTestCases[known:]}


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


def _judged(case: NodeTest) -> None:
    """Fails where a case is neither right nor refused as it is listed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # how a defect of the substitutions is told
            got = _run(case)
    except MlcError as error:
        assert case.name in REFUSED, f"it is refused: {error}"
        assert "\n" not in str(error) and str(error)
        return
    assert case.name not in REFUSED, f"it works now; take it out of {LISTED.name}"
    (_, expected), *_ = case.data_sets
    assert len(got) == len(expected)
    if any(part in case.name for part in DIFFERENT):
        with pytest.raises(AssertionError):  # else it is right now: take it out of DIFFERENT
            _agree(got, expected, case)
        return
    _agree(got, expected, case)


def _all_judged(module: str, taken: Callable[[str], bool]) -> None:
    wrong = []
    for case in _cases(module).values():
        if taken(case.name):
            try:
                _judged(case)
            except Exception as error:  # the others are judged all the same
                wrong.append(f"{case.name}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("module", MODULES)
def test_an_eighth_of_the_nodes(module: str) -> None:
    _all_judged(module, lambda name: zlib.crc32(name.encode()) % _PARTS == 0)


@pytest.mark.slow
@pytest.mark.timeout(_SECONDS)
@pytest.mark.parametrize("module", MODULES)
def test_the_other_nodes(module: str) -> None:
    _all_judged(module, lambda name: zlib.crc32(name.encode()) % _PARTS != 0)


@pytest.mark.slow
def test_what_is_listed_exists() -> None:
    assert not REFUSED.difference(*map(_cases, MODULES))


@pytest.mark.slow
def test_the_guide_says_how_many_they_are() -> None:
    names = [name for module in MODULES for name in _cases(module)]
    different = sum(any(part in name for part in DIFFERENT) for name in names)
    guide = (Path(__file__).parents[2] / "tutorials" / "guides" / "add_an_operator.md").read_text(encoding="utf-8")
    for count in (len(names), len(names) - len(REFUSED) - different, len(REFUSED)):
        assert f" {count:,} " in " ".join(guide.split())
