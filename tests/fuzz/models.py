"""Damaged ONNX files: ``python -m tests.fuzz.models --count 10000 --seed 0``.

Every case is imported; every tenth of a kind is compiled, run, and compared with onnxruntime (and, where they differ,
with onnx's reference evaluator) on the files that those accept. Most damage leaves no model, so that such a case draws
until something can be imported.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from mlc.errors import MlcError
from mlc.testing.targets import runs
from tests.fuzz import harness
from tests.fuzz.harness import Case, Outcome
from tests.fuzz.onnx_mutations import DAMAGES, damaged

__all__ = ["check", "main"]

STRATEGIES = tuple(DAMAGES)
#: the widest of these that this machine runs
TARGET = next(filter(runs, ("x86-64-v3", "x86-64-v2")), "native")
#: of every so many cases of a kind one is compiled
COMPILED = 10
#: files of one case at most
_DRAWS = 12
_TOLERANCE = 1e-3


def check(case: Case) -> Outcome:
    """Import the case's file; of every tenth case compile, run and compare the first one that can be imported."""
    from mlc.frontend import load_model

    rng, compiled = case.rng(), case.seed % COMPILED == 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "m.onnx")
        for left in range(_DRAWS if compiled else 1, 0, -1):
            path.write_bytes(damaged(case.strategy, rng))
            try:
                model = load_model(path)
            except MlcError:
                if left == 1:
                    raise
            else:
                break
        return Outcome.RIGHT if not compiled or _agrees(path, model) else Outcome.WRONG


def _agrees(path: Path, model: Any) -> bool:
    import mlc
    from mlc.networks.inputs import random_inputs

    inputs = random_inputs(model.inputs, seed=1)
    wanted = _apart(lambda: _onnxruntime(path, inputs))
    found = mlc.compile(path, target=TARGET, log=False)(*inputs.values())
    if wanted is not None and _equal(found, wanted):
        return True
    if (numbers := _without_nan(path)) is not None:
        return _agrees(numbers, model)
    other = _apart(lambda: _reference(path, inputs))
    if other is None and wanted is None:  # nobody says otherwise
        return True
    if other is not None and _equal(found, _known(other, wanted, found)):
        return True
    for mine, theirs in zip(found, wanted or other or (), strict=False):
        print(mine.dtype, mine.shape, mine.ravel()[:6], np.shape(theirs), np.ravel(theirs)[:6], file=sys.stderr)
    return False


def _without_nan(path: Path) -> Path | None:
    """Where a weight is NaN in a model that makes whole numbers of floating-point ones, the model with 0 instead: ONNX
    does not say which number NaN becomes, and engines differ. None for any other."""
    from onnx import numpy_helper

    model, changed = onnx.load(path), False
    if not any("QuantizeLinear" in node.op_type for node in model.graph.node):
        return None
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor)
        if array.dtype.kind == "f" and np.isnan(array).any():
            numbers = np.where(np.isnan(array), 0, array).astype(array.dtype)
            tensor.CopyFrom(numpy_helper.from_array(numbers, tensor.name))
            changed = True
    other = path.with_name("numbers.onnx")
    if changed:
        onnx.save(model, other)
    return other if changed else None


def _known(
    first: Sequence[np.ndarray], second: Sequence[np.ndarray] | None, found: Sequence[np.ndarray]
) -> Sequence[np.ndarray]:
    """What the first says, and the second where the first says NaN and what was found does not: a weight that is NaN
    reaches as much of a result as an engine multiplies it with, 0 included or not."""
    shapes = [[array.shape for array in each] for each in (first, second or (), found)]
    if second is None or shapes[0] != shapes[1] or shapes[0] != shapes[2]:
        return first
    return [np.where(np.isnan(one) & ~np.isnan(mine), other, one) if one.dtype.kind == "f" else one
            for one, other, mine in zip(first, second, found, strict=True)]


def _onnxruntime(path: Path, inputs: dict[str, np.ndarray]) -> Sequence[np.ndarray]:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, inputs))


def _reference(path: Path, inputs: dict[str, np.ndarray]) -> Sequence[np.ndarray]:
    from onnx.reference import ReferenceEvaluator

    return list(ReferenceEvaluator(onnx.load(path)).run(None, inputs))


def _apart(compute: Callable[[], Sequence[np.ndarray]]) -> Sequence[np.ndarray] | None:
    """What it computes in a process of its own: an engine that crashes or refuses is no reference."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        try:
            result = pickle.dumps([np.asarray(array) for array in compute()])
            with os.fdopen(write_end, "wb") as pipe:
                pipe.write(result)
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return pickle.loads(said) if said else None


def _equal(found: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> bool:
    return len(found) == len(wanted) and all(map(_close, found, wanted))


def _close(mine: np.ndarray, theirs: np.ndarray) -> bool:
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return False
    sixteen = mine.dtype.name in ("float16", "bfloat16")  # of which the reference rounds each step
    if mine.dtype.name == "bfloat16":
        mine, theirs = mine.astype("f4"), theirs.astype("f4")
    if mine.dtype.kind not in "f":
        return bool(np.abs(mine.astype("f8") - theirs.astype("f8")).max(initial=0) <= (mine.dtype.itemsize == 1))
    finite = np.abs(theirs[np.isfinite(theirs)], dtype="f8")
    scale = _TOLERANCE * (10 if sixteen else 1)
    atol = max(scale * min(1.0, finite.max(initial=0)), _step(theirs))
    return np.allclose(mine, theirs, rtol=scale, atol=atol, equal_nan=True)


def _step(values: np.ndarray) -> float:
    """The step of dequantized values, 0 for others: a sum halfway between two levels may be rounded to either."""
    levels = np.unique(values[np.isfinite(values)].astype("f8"))
    if not 2 <= len(levels) <= 256:
        return 0.0
    step = np.diff(levels).min()
    steps = levels / step
    return float(step) * 1.001 if np.allclose(steps, np.round(steps), rtol=0, atol=1e-3) else 0.0


def main(argv: Sequence[str] | None = None) -> int:
    """Import beforehand what every case needs, so that only the cases are timed."""
    import onnxruntime  # noqa: F401

    from mlc import api  # noqa: F401
    from mlc.frontend import load_model
    from tests.fuzz.networks import network

    load_model(network("dense"))  # the importer's own imports
    return harness.main(STRATEGIES, check, argv)


if __name__ == "__main__":
    sys.exit(main())
