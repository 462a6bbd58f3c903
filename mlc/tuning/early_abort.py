"""Ends a run early, with the likely cause, when the first candidates of several tasks all fail in the same way.

A target with instructions that the CPU lacks, a full disk, an installation that the workers cannot use: whatever it is,
it meets every candidate of every function, and an hour of trials would find out no more than the first few.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from mlc.errors import MeasureError
from mlc.measure.measurer import MeasureResult
from mlc.target import Target

__all__ = ["FirstResults", "HopelessRun"]

#: candidates that are measured first of all; each that fails may cost a worker, which takes seconds to start
_FIRST = 2
#: failures, and functions that they are of where the model has so many, that are no chance any more
_FAILURES, _FUNCTIONS = 4, 3
_SIGNAL = re.compile(r"\bended with (SIG[A-Z]+|exit code -?\d+)")

#: what a failure's detail holds -> the likely cause and what to do
_CAUSES: tuple[tuple[str, str], ...] = (
    (r"No space left|Disk quota", "no space is left where files are written; free some, or name another place in "
                                  "TMPDIR"),
    (r"No module named|ImportError|cannot import|cannot open shared object", "the workers' Python lacks a part of the "
                                  "installation; `mlc doctor` says which"),
    (r"SIGKILL|MemoryError|bad_alloc|[Cc]annot allocate", "memory has run out, or something ends the workers; free "
                                  "memory, or tune a smaller batch of the model"),
    (r"nvcc", "nvcc refuses what it is given; `mlc doctor` looks at it, and MLC_NVCC names another"),
    (r"CUDA|no device", "the GPU or its driver does not work; look at `nvidia-smi` and `mlc doctor`"),
)
_KINDS = {
    "build": "code generation refuses every candidate; `mlc doctor` looks at the installation",
    "crash": "TVM or the installation is broken, or the code does not suit this machine; `mlc doctor` looks at both",
    "timeout": "the machine is too busy or too slow; end what runs there, or give a smaller model",
    "wrong": "this machine computes other numbers than the reference; try --target x86-64-v3, and report it",
    "run": "no candidate can be run or compared; `mlc doctor` looks at the installation",
}


class HopelessRun(MeasureError):
    """The first candidates of several functions all failed alike."""


class FirstResults:
    """Watches a run on ``functions`` functions until a candidate works, or two fail in different ways."""

    def __init__(self, target: Target, functions: int) -> None:
        self._target, self._wanted = target, min(_FUNCTIONS, functions)
        self._functions: set[str] = set()
        self._failures: list[MeasureResult] = []
        #: whether nothing has worked so far, and all that failed did so alike
        self.open = True

    def note(self, function: str, results: Sequence[MeasureResult]) -> None:
        """Take the next results into account."""
        failures = [result for result in results if result.failure]
        self._failures += failures
        self._functions.add(function)
        alike = len({_kind(failure) for failure in self._failures}) <= 1
        self.open = self.open and alike and len(failures) == len(results)

    def count(self, wanted: int) -> int:
        """How many of ``wanted`` candidates to measure before it is looked at what became of them."""
        if not self.open:
            return wanted
        return 1 if self._failures else min(_FIRST, wanted)

    def seen(self, function: str) -> bool:
        """Whether enough is known of a function as long as there are others."""
        return self.open and function in self._functions and len(self._functions) < self._wanted

    @property
    def hopeless(self) -> bool:
        """Whether there is no use in going on."""
        return self.open and len(self._failures) >= _FAILURES and len(self._functions) >= self._wanted

    def diagnosis(self) -> str:
        """One line: what failed, the likely cause, and what to do."""
        count, functions, first = len(self._failures), len(self._functions), self._failures[0]
        signal = _SIGNAL.search(first.detail)
        words = f"{count} {first.failure}" + (f": {signal[1]}" if signal else "")
        of = f"{functions} functions" if functions > 1 else "one function"
        return f"some candidate must run, but all {count} failed ({words}), of {of}: {self._cause(first)}"

    def _cause(self, failure: MeasureResult) -> str:
        if "SIGILL" in failure.detail:
            return self._illegal()
        told = f" ({failure.detail})" if failure.detail and failure.failure in ("build", "run", "crash") else ""
        for pattern, cause in _CAUSES:
            if re.search(pattern, failure.detail):
                return cause + told
        return _KINDS.get(failure.failure, "`mlc doctor` looks at the installation") + told

    def _illegal(self) -> str:
        """The instructions that the target has and the CPU does not show."""
        from tvm.target import codegen

        from mlc.cpu import host_cpu

        target = self._target.tvm if self._target.kind == "llvm" else self._target.tvm.host
        hidden = host_cpu().hidden(str(feature) for feature in codegen.llvm_get_cpu_features(target))
        named = f" ({', '.join(hidden)})" if hidden else ""
        return (f"{self._target.canonical} has instructions that this CPU lacks{named}; give an older level such as "
                "--target x86-64-v3, and look at `mlc doctor`")


def _kind(result: MeasureResult) -> tuple[str, str]:
    """Equal for failures that are alike: the word for them, and which signal or message, its numbers left out."""
    signal = _SIGNAL.search(result.detail)
    if signal:
        return result.failure, signal[1]
    told = result.failure in ("build", "run")
    return result.failure, re.sub(r"\d+", "#", result.detail)[:80] if told else ""
