"""Builds several lowered modules and times them interleaved, as whole models."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import tvm

from mlc.artifact.compile import compile_module
from mlc.artifact.executable import Executable
from mlc.artifact.schedule import Lookup
from mlc.artifact.smoke_test import sample_input
from mlc.target import Target

__all__ = ["in_turn", "times_in_turn"]

#: rounds, and seconds of each module in each
_ROUNDS, _ROUND_SECONDS = 25, 0.03


def times_in_turn(modules: Sequence[tvm.IRModule], target: Target, lookup: Lookup) -> list[list[float]]:
    """:func:`in_turn` of the modules, built. Raises :class:`mlc.errors.BuildError` where one cannot be."""
    return in_turn([compile_module(mod, target, lookup) for mod in modules])


def in_turn(models: Sequence[Executable]) -> list[list[float]]:
    """Seconds of a call of each compiled model, on random inputs, in rounds in which each has its turn.

    What disturbs the machine in a round disturbs all alike. Raises :class:`mlc.errors.ArtifactError` where this machine
    cannot run one.
    """
    rng = np.random.default_rng(0)
    calls = []
    for exe in models:
        arrays = [sample_input(rng, spec) for spec in exe.inputs]
        exe(*arrays)
        started = time.perf_counter()
        exe(*arrays)
        count = max(1, round(_ROUND_SECONDS / max(1e-6, time.perf_counter() - started)))
        calls.append((exe, arrays, count))
    times: list[list[float]] = [[] for _ in models]
    for _ in range(_ROUNDS):
        for (exe, arrays, count), own in zip(calls, times, strict=True):
            started = time.perf_counter()
            for _ in range(count):
                exe(*arrays)
            own.append((time.perf_counter() - started) / count)
    return times
