"""Runs artifacts with every array between inaccessible pages, so that any access beyond an array is a fault.

``python -m mlc.testing.guard MODEL.so 1,64 3,64`` runs an artifact with random arrays of each shape and says which
run was the last one if that ends in a segmentation fault. For several inputs, shapes are joined by ``+``.

Numbers do not tell such accesses: what is read behind the last row of an array goes into rows that are not stored. The
allocator is ``guard.c``, preloaded into a child process; what numpy allocates is not guarded, so inputs are arrays of
TVM's. Linux alone.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlc.testing.preloading import compiled

if TYPE_CHECKING:
    from mlc.artifact.executable import Executable

__all__ = ["faults", "library", "main", "missing"]

_SOURCE = Path(__file__).with_suffix(".c")


def missing() -> str:
    """What is not there of what this needs; empty where it can run."""
    if platform.system() != "Linux":
        return "Linux"
    return "" if shutil.which("cc") else "cc"


def library() -> Path:
    """``guard.c``, compiled."""
    return compiled(_SOURCE)


def faults(path: Path, calls: Sequence[str]) -> str:
    """Run an artifact in a child process with arrays of these shapes; empty if it ends well, else the call in which a
    signal ended it. Raises ``RuntimeError`` with what the child says where it fails in another way."""
    command = [sys.executable, "-m", "mlc.testing.guard", "--inside", str(path), *calls]
    ended = subprocess.run(command, env={**os.environ, "LD_PRELOAD": str(library())}, capture_output=True, text=True,
                           check=False)
    if ended.returncode == 0:
        return ""
    begun = [line for line in ended.stdout.splitlines() if line in calls]
    if ended.returncode > 0:
        raise RuntimeError(ended.stderr.strip().rpartition("\n")[2])
    return f"{begun[-1] if begun else 'loading'}: {signal.Signals(-ended.returncode).name}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run an artifact; exit code 1 if an access faults."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifact", type=Path, help="what `mlc compile` wrote for this CPU")
    parser.add_argument("calls", nargs="+", metavar="SHAPE[+SHAPE...]", help="the shape of each input of a run")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.inside:
        _run(args.artifact, args.calls)
        return 0
    if lacking := missing():
        parser.error(f"guarded runs need {lacking}, which is not there")
    try:
        found = faults(args.artifact, args.calls)
    except RuntimeError as error:
        parser.error(str(error))
    print(found or f"no access beyond an array in {len(args.calls)} runs")
    return int(bool(found))


def _run(path: Path, calls: Sequence[str]) -> None:
    import mlc

    executable = mlc.load(path)
    for call in calls:
        print(call, flush=True)
        _call(executable, [tuple(map(int, shape.split(","))) for shape in call.split("+")])


def _call(executable: Executable, shapes: Sequence[tuple[int, ...]]) -> None:
    import numpy as np

    from mlc.artifact.runtime import array_of, empty_tensor

    rng, arrays = np.random.default_rng(0), []
    for given, shape in zip(executable.inputs, shapes, strict=True):
        array = array_of(empty_tensor(shape, given.dtype))
        array[...] = rng.integers(0, 2, shape) if "int" in given.dtype else rng.standard_normal(shape)
        arrays.append(array)
    executable(*arrays)


if __name__ == "__main__":
    raise SystemExit(main())
