"""The same seed on the same log proposes the same candidates in the same order, in whichever process it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, sys
from hashlib import blake2b
from tvm import te, tirx
from mlc.graph.task import Task, normalise
from mlc.log import TuningLog
from mlc.target import resolve
from mlc.testing.measuring import FakeMeasurer
from mlc.tuning import TuneOptions, journal, session, tune_tasks

target = resolve("x86-64-v4", threads=2)

def product(m, n, k):
    a, b = te.placeholder((m, k), name="A"), te.placeholder((k, n), name="B")
    r = te.reduce_axis((0, k), name="r")
    return [a, b, te.compute((m, n), lambda i, j: te.sum(a[i, r] * b[r, j], axis=[r]), name="C")]

def activation(*shape):
    a = te.placeholder(shape, name="A")
    return [a, te.compute(shape, lambda *i: tirx.max(a(*i), tirx.const(0.0, "float32")), name="C")]

class Clock:
    "Every look takes ten milliseconds."
    now = 100.0
    def monotonic(self):
        self.now += 0.01
        return self.now
    time = monotonic

def seconds(values):
    drawn = blake2b(repr(values).encode(), digest_size=4).digest()
    return 1e-3 * (1.0 + int.from_bytes(drawn, "big") / 2**32)

given = (product(96, 128, 64), product(48, 256, 32), activation(64, 56, 56))
tasks = [Task(f"task{i}", normalise(te.create_prim_func(args)), target, weight=i + 1) for i, args in enumerate(given)]
found = []
with TuningLog(sys.argv[1]) as log:
    for seed in map(int, sys.argv[2:]):
        measurer = FakeMeasurer(seconds, noise=0.02, failure=lambda v: "crash" if seconds(v) > 1.9e-3 else "")
        session.time = journal.time = Clock()
        report = tune_tasks(tasks, target, log, TuneOptions(trials=48, seed=seed), measurer)
        best = [log.best(task.key) for task in tasks]
        found.append([[r.task_key, r.trace] for r in measurer.log])
        found.append([report.reason, [t.trials for t in report.tasks], [r and r.decisions for r in best]])
print(json.dumps(found))
"""


@pytest.mark.timeout(240)
def test_two_processes_measure_the_same_candidates_in_the_same_order(tmp_path: Path) -> None:
    """The default strategy and the learned model on real spaces; a second run starts from what the first one left."""
    seen = []
    for name, salt in (("a", "0"), ("b", "4711")):  # sets of texts are walked in another order in each
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path / f"{name}.db"), "5", "6"], capture_output=True, text=True,
            check=True, env={**os.environ, "PYTHONHASHSEED": salt},
        )
        seen.append(json.loads(done.stdout))
    assert seen[0] == seen[1]
    first, (_, trials, _), second, _ = seen[0]
    assert len(first) >= 48 and min(trials) > 0
    assert not {tuple(r) for r in first} & {tuple(r) for r in second}, "what the log knows is not measured again"
