"""A fake measurer: synthetic times computed from a candidate's decisions, with failures on demand."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from hashlib import blake2b

from mlc.measure.measurer import MeasureRequest, MeasureResult

__all__ = ["FakeMeasurer", "bowl", "decided"]


def decided(trace: str) -> tuple[int, ...]:
    """The values that a trace's ``sample_categorical`` instructions were decided on, in order."""
    instructions, decisions = json.loads(trace)
    return tuple(int(instructions[at][2][0][choice]) for at, choice in decisions)


def bowl(best: Sequence[int]) -> Callable[[tuple[int, ...]], float]:
    """Seconds that grow with the squared distance, in powers of two, from ``best``, where they are 1 ms."""

    def seconds(values: tuple[int, ...]) -> float:
        distance = sum((math.log2(v + 1) - math.log2(b + 1)) ** 2 for v, b in zip(values, best, strict=True))
        return 1e-3 * (1.0 + 0.2 * distance)

    return seconds


class FakeMeasurer:
    """``seconds`` maps decisions to a time, ``failure`` to a reason or the empty text. ``noise`` is relative.

    ``log`` holds every request measured, ``interrupt_at`` raises ``KeyboardInterrupt`` after so many results.
    ``code`` is what decisions lower to (default: all to different code).
    """

    def __init__(
        self, seconds: Callable[[tuple[int, ...]], float], *, noise: float = 0.0, seed: int = 0,
        failure: Callable[[tuple[int, ...]], str] = lambda values: "", interrupt_at: int | None = None,
        code: Callable[[tuple[int, ...]], str] | None = None,
    ) -> None:
        self.code = code
        self.seconds, self.failure, self.noise = seconds, failure, noise
        self.interrupt_at = interrupt_at
        self.log: list[MeasureRequest] = []
        self.compared: list[list[MeasureRequest]] = []
        self.closed = False
        self._rng = random.Random(seed)

    def measure(
        self, requests: Sequence[MeasureRequest], on_result: Callable[[int, MeasureResult], None] | None = None
    ) -> list[MeasureResult]:
        results = []
        for i, request in enumerate(requests):
            if self.interrupt_at is not None and len(self.log) >= self.interrupt_at:
                raise KeyboardInterrupt
            self.log.append(request)
            results.append(self._result(request, 3))
            if on_result is not None:
                on_result(i, results[-1])
        return results

    def compare(self, requests: Sequence[MeasureRequest], rounds: int) -> list[MeasureResult]:
        self.compared.append(list(requests))
        return [self._result(request, rounds) for request in requests]

    def close(self) -> None:
        self.closed = True

    def _result(self, request: MeasureRequest, repeats: int) -> MeasureResult:
        values = decided(request.trace)
        reason = self.failure(values)
        if reason:
            return MeasureResult(failure=reason, detail=f"injected for {values}")
        true = self.seconds(values)
        times = tuple(true * (1.0 + self.noise * self._rng.gauss(0.0, 1.0)) for _ in range(repeats))
        code = self.code(values) if self.code else blake2b(request.trace.encode(), digest_size=8).hexdigest()
        return MeasureResult(times, build_seconds=0.1, run_seconds=0.1, code_hash=code)
