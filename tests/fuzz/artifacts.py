"""Compiled models that were damaged or crafted: each is refused in one line, or computes what the whole one does.

``python -m tests.fuzz.artifacts --count 1000 --seed 0``
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from functools import cache
from pathlib import Path
from random import Random

import numpy as np

import mlc
from mlc.artifact import runtime
from mlc.cpu import host_flags
from tests.fuzz.artifact_files import CONTENTS, Written, parts, some_range, whole
from tests.fuzz.harness import Case, Outcome, main

__all__ = ["STRATEGIES", "check"]

STRATEGIES = (*CONTENTS, "no plain file", "overwritten after loading", "overwritten while loading")


def _inputs() -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    return [rng.standard_normal((3, 64), dtype=np.float32) for _ in range(2)]


@cache
def _expected() -> list[bytes]:
    """What the whole artifact computes, in a process of its own."""
    code = ("import sys, pickle, mlc; from tests.fuzz.artifacts import _inputs\n"
            "sys.stdout.buffer.write(pickle.dumps([a.tobytes() for a in mlc.load(sys.argv[1])(*_inputs())]))")
    with Written(whole()) as path:
        done = subprocess.run([sys.executable, "-c", code, path], check=True, capture_output=True)
    return list(pickle.loads(done.stdout))


def check(case: Case) -> Outcome:
    """Load and run the case's artifact."""
    rng = case.rng()
    if case.strategy == "no plain file":
        return _no_plain_file(rng)
    if case.strategy == "overwritten after loading":
        return _overwritten(rng)
    if case.strategy == "overwritten while loading":
        return _rewritten(rng)
    with Written(CONTENTS[case.strategy](rng)) as path:
        return _outcome(mlc.load(path))


def _outcome(exe: mlc.Executable) -> Outcome:
    return Outcome.RIGHT if [array.tobytes() for array in exe(*_inputs())] == _expected() else Outcome.WRONG


def _no_plain_file(rng: Random) -> Outcome:
    with Written(whole()) as path:
        path.unlink()
        match rng.randrange(6):
            case 0:
                path.mkdir()
            case 1:
                os.mkfifo(path)
            case 2:
                path.symlink_to(path)
            case 3:
                path.symlink_to(rng.choice(("/dev/zero", "/dev/null", "/dev/tty", "/proc/self/mem", "/proc/self/maps")))
            case 4:
                path = Path(f"{path}\0")
            case _:
                path = path / "deeper" / ("a" * rng.choice((3, 300, 5000)))
        return _outcome(mlc.load(path))


def _overwritten(rng: Random) -> Outcome:
    """A model that is in use goes on as it was, whatever is written into its file."""
    with Written(whole()) as path:
        exe = mlc.load(path)
        first = _outcome(exe) if rng.random() < 0.5 else Outcome.RIGHT
        with path.open("r+b") as file:
            match rng.randrange(3):
                case 0:
                    file.truncate(rng.randrange(len(whole())))
                case 1:
                    file.write(rng.randbytes(len(whole())))
                case _:
                    start, length = some_range(rng)
                    file.seek(start)
                    file.write(bytes(length))
        return first if first is Outcome.WRONG else _outcome(exe)


def _rewritten(rng: Random) -> Outcome:
    """Another process writes into the file while this one reads it."""
    with Written(whole()) as path:
        writer = os.fork()
        if not writer:
            with path.open("r+b") as file:
                for _ in range(200):
                    start, length = some_range(rng)
                    file.seek(start)
                    file.write(rng.randbytes(length))
                    file.flush()
            os._exit(0)
        try:
            return _outcome(mlc.load(path))
        finally:
            os.waitpid(writer, 0)


def prepare() -> None:
    """What every case needs, loaded once; no compiled code runs in this process."""
    whole(), parts(), _expected()
    runtime.function("runtime.NumThreads")
    host_flags()


if __name__ == "__main__":
    prepare()
    sys.exit(main(STRATEGIES, check))
