"""One node of onnxruntime's own operators, and what it computes in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper
from quantised_nodes import MICROSOFT, imported_numbers, model_of, onnxruntime_numbers

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """One node; ``wanted`` computes its result in float64. ``here``: onnxruntime has a CPU kernel for it."""

    operator: str
    inputs: str
    feeds: Arrays
    constants: Arrays
    output: tuple[str, int]
    wanted: Callable[[], np.ndarray]
    attributes: Mapping[str, Any]
    here: bool = True


def wide(array: Any) -> np.ndarray:
    return np.asarray(array).astype("float64")


def model_of_node(case: Case) -> onnx.ModelProto:
    node = helper.make_node(case.operator, [name if name != "-" else "" for name in case.inputs.split()], ["y"],
                            domain=MICROSOFT, **case.attributes)
    constants = {name: array for name, array in case.constants.items() if name in case.inputs.split()}
    return model_of([node], case.feeds, constants, {"y": case.output}, opset=17)


def numbers_of(case: Case) -> np.ndarray:
    """mlc's numbers in float64, compared with onnxruntime's where it has a kernel."""
    model = model_of_node(case)
    (found,) = imported_numbers(model, case.feeds)
    assert found.dtype == case.output[0]
    if case.here:
        (theirs,) = onnxruntime_numbers(model, case.feeds)
        atol = 1 if found.dtype.kind in "iu" else 1e-5 * np.abs(theirs).max()
        np.testing.assert_allclose(wide(found), wide(theirs), rtol=0, atol=atol)
    return wide(found)
