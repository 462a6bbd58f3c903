"""Times each call that the virtual machine makes, through its instrumentation hook."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

__all__ = ["Stopwatch"]


class Stopwatch:
    """The virtual machine's instrument: called before and after each call instruction. ``symbols`` are the functions to
    time; ``synchronise`` waits for asynchronous work of a call."""

    def __init__(self, symbols: Sequence[str], synchronise: Callable[[], None]) -> None:
        self._synchronise = synchronise
        self._seconds = dict.fromkeys(symbols, 0.0)
        self._started = 0.0

    def __call__(self, function: Any, symbol: str, before: bool, result: Any, *args: Any) -> None:
        if symbol not in self._seconds:
            return
        if before:
            self._started = time.perf_counter()
        else:
            self._synchronise()
            self._seconds[symbol] += time.perf_counter() - self._started

    def medians(self, run: Callable[[], object], repeats: int) -> dict[str, float]:
        """Seconds a run of each function, the median of ``repeats`` runs after an untimed one."""
        runs = []
        for _ in range(repeats + 1):
            self._seconds = dict.fromkeys(self._seconds, 0.0)
            run()
            runs.append(self._seconds)
        return {symbol: median(seconds[symbol] for seconds in runs[1:]) for symbol in self._seconds}
