"""Random sound models, each of which must compile and be right: ``python -m tests.fuzz.random_models --count 1000``.

Networks of :mod:`tests.fuzz.random_networks`, compiled for this CPU or a lesser one of its kind and compared with
onnxruntime, which evaluates each node alone. Those of free sizes have what mlc refuses in one line (which of a number
and a size is smaller, say); of static sizes, all should be right. Quantised ones may be a step off, and further as far
as integers that are a step off move them, but not on average. ``--verbose`` prints what was refused, and why.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from random import Random

import numpy as np

from mlc.errors import MlcError
from tests.fuzz import harness
from tests.fuzz.harness import Case, Outcome
from tests.fuzz.random_networks import KINDS, Allowed, Network, random_network

__all__ = ["KINDS", "case_network", "check", "main", "target_of"]

TARGETS = ("native", "x86-64-v3", "x86-64-v2")
#: what code generation, the tables of schedules and one call take of the processors
SECONDS = 240.0


class SlowError(MlcError):
    """A function that no schedule of its space fits."""


def case_network(case: Case) -> Network:
    """The case's network of 3 to 16 nodes."""
    rng = case.rng()
    return random_network(rng, case.strategy, rng.randint(3, 16))


def target_of(case: Case) -> str:
    """The target that the case is compiled for, one that this CPU can run."""
    from mlc.testing.targets import runs

    name = Random(str(case)).choice(TARGETS)
    return name if runs(name) else "native"


def check(case: Case) -> Outcome:
    """Compile the case's network, run it at each of its sizes, and compare."""
    import mlc

    network = case_network(case)
    with warnings.catch_warnings(record=True) as said:
        executable = mlc.compile(network.model, target=target_of(case), log=False)
    if said:  # it is right, but slow
        raise SlowError(str(said[0].message))
    for inputs, wanted, allowed in zip(network.inputs, network.outputs, network.allowed, strict=True):
        found = dict(zip(wanted, executable(*inputs.values()), strict=True))
        wrong = [name for name in wanted if not _agree(found[name], wanted[name], allowed[name])]
        if wrong:
            print(_difference(found, wanted, wrong[0]), file=sys.stderr)
            return Outcome.WRONG
    return Outcome.RIGHT


def _agree(found: np.ndarray, wanted: np.ndarray, allowed: Allowed) -> bool:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    if wanted.dtype.kind in "biu" and wanted.dtype not in (np.int8, np.uint8):
        return bool(np.array_equal(found, wanted))
    off = np.abs(np.subtract(found, wanted, dtype="f8"))
    return bool(np.isfinite(off).all() and off.max() <= allowed.most and off.mean() <= allowed.average)


def _difference(found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray], name: str) -> str:
    mine, theirs = found[name], wanted[name]
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return f"{name} is {mine.dtype}{mine.shape}, not {theirs.dtype}{theirs.shape}"
    off = np.abs(np.subtract(mine, theirs, dtype="f8"))
    return f"{name} of {mine.dtype}{mine.shape} is off by {off.max():.3g}, the largest is {np.abs(theirs).max():.3g}"


def main(argv: Sequence[str] | None = None) -> int:
    """Import beforehand what every case needs, so that only the cases are timed."""
    import onnxruntime  # noqa: F401

    from mlc import api  # noqa: F401
    from mlc.frontend import load_model
    from tests.fuzz.networks import network

    load_model(network("dense"))
    return harness.main(KINDS, check, argv, seconds=SECONDS, extra_bytes=8 << 30)


if __name__ == "__main__":
    sys.exit(main())
