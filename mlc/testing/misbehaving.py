"""Measurers whose candidates crash, hang or return wrong results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b

import tvm
from tvm import s_tir, tirx

from mlc.graph.task import from_json, to_json
from mlc.measure.compiling_runner import params_of
from mlc.measure.measurer import Measurer, MeasureRequest, MeasureResult
from schedules.trace import replay

__all__ = ["FAILURES", "Refuser", "Saboteur", "fate_of", "spoilt"]

#: what a record says about a candidate that was made to fail in one of these ways
FAILURES = ("crash", "timeout", "wrong")
_SIGNALS = {"crash": 11, "illegal": 4}
_WRONG = 1e4  # no output of a random input comes near


def fate_of(trace: str, part: float = 0.1, hanging: float = 1 / 3) -> str:
    """How the candidate with this trace is to fail, empty for most: ``part`` of all do, ``hanging`` of them hang."""
    drawn = int.from_bytes(blake2b(trace.encode(), digest_size=8).digest(), "big") / 2**64
    if drawn >= part:
        return ""
    drawn /= part
    if drawn < hanging:
        return "timeout"
    return "crash" if drawn < (1 + hanging) / 2 else "wrong"


def spoilt(func: tirx.PrimFunc, failure: str) -> tirx.PrimFunc:
    """A scheduled function that does what it did and besides fails as ``failure`` says, a word of :data:`FAILURES` or
    ``illegal``: a crash by an instruction that the CPU does not have."""
    root = func.body.block
    if failure in _SIGNALS:
        parts = [tirx.Evaluate(tirx.call_extern("int32", "raise", _SIGNALS[failure])), root.body]
    elif failure == "timeout":
        forever = tirx.call_extern("int32", "usleep", 1000) == 0
        parts = [root.body, tirx.While(forever, tirx.Evaluate(tirx.call_extern("int32", "usleep", 1000)))]
    else:
        out = next(p for p, param in zip(func.params, params_of(func), strict=True) if param.output)
        parts = [root.body, tirx.BufferStore(out, tirx.const(_WRONG, out.dtype), [0] * len(out.shape))]
    block = s_tir.SBlock(
        root.iter_vars, root.reads, root.writes, root.name_hint, tirx.SeqStmt(parts), root.init, root.alloc_buffers,
        root.match_buffers, root.annotations,
    )
    return func.with_body(s_tir.SBlockRealize(func.body.iter_values, func.body.predicate, block))


class Saboteur:
    """Implements :class:`mlc.measure.measurer.Measurer`: passes requests on to another one, those spoilt for which
    ``fate`` says how."""

    def __init__(self, inner: Measurer, fate: Callable[[str], str] = fate_of) -> None:
        self._inner, self._fate = inner, fate

    def measure(
        self, requests: Sequence[MeasureRequest], on_result: Callable[[int, MeasureResult], None] | None = None
    ) -> list[MeasureResult]:
        return self._inner.measure([self._passed(request) for request in requests], on_result)

    def compare(self, requests: Sequence[MeasureRequest], rounds: int) -> list[MeasureResult]:
        return self._inner.compare([self._passed(request) for request in requests], rounds)

    def close(self) -> None:
        self._inner.close()

    def _passed(self, request: MeasureRequest) -> MeasureRequest:
        failure = self._fate(request.trace)
        if not failure:
            return request
        with tvm.target.Target(request.target):
            scheduled = replay(from_json(request.func), request.trace).mod["main"]
        return replace(request, trace="", scheduled=to_json(spoilt(scheduled, failure)))


class Refuser:
    """Implements :class:`mlc.measure.measurer.Measurer`: every candidate fails in the same way, but for those that
    ``works`` says."""

    def __init__(self, failure: str, detail: str, works: Callable[[int], bool] = lambda number: False) -> None:
        self._result, self._works = MeasureResult(failure=failure, detail=detail), works
        self.measured: list[MeasureRequest] = []

    def measure(
        self, requests: Sequence[MeasureRequest], on_result: Callable[[int, MeasureResult], None] | None = None
    ) -> list[MeasureResult]:
        results = []
        for index, request in enumerate(requests):
            worked = self._works(len(self.measured))
            self.measured.append(request)
            results.append(MeasureResult(times=(1e-3,)) if worked else self._result)
            if on_result is not None:
                on_result(index, results[-1])
        return results

    def compare(self, requests: Sequence[MeasureRequest], rounds: int) -> list[MeasureResult]:
        return [MeasureResult(times=(1e-3,) * rounds) for _ in requests]

    def close(self) -> None:
        """Nothing is held."""
