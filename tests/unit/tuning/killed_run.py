"""How the programs begin that tests start as tuning runs, to kill them."""

from __future__ import annotations

__all__ = ["BEGINNING"]

#: imports, and ``tasks`` of ``target``; the rest opens the log and measures
BEGINNING = """
import sys
from tvm import te
from mlc.graph.task import Task, normalise
from mlc.log import TuningLog
from mlc.target import resolve
from mlc.tuning import TuneOptions, allocation, search, tune_tasks

allocation.PATIENCE, allocation.NEAR = 10**6, 1e9  # nothing but a kill ends a run
search._REPLAYED = 16  # starting must not take longer the more there is in the log
target = resolve("native", threads=1)

def product(m, n, k):
    a, b = te.placeholder((m, k), name="A"), te.placeholder((k, n), name="B")
    r = te.reduce_axis((0, k), name="r")
    c = te.compute((m, n), lambda i, j: te.sum(a[i, r] * b[r, j], axis=[r]), name="C")
    return Task(f"product_{m}", normalise(te.create_prim_func([a, b, c])), target)

tasks = [product(m, 96, 64) for m in (48, 96, 144, 192)]
"""
