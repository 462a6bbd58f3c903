"""Real tuning runs killed at random moments: the log opens, keeps what was acknowledged, and the next run goes on."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlc.log import TuningLog, check

KILLS = 100
RUN = """
import sys
from tvm import te
from mlc.graph.task import Task, normalise
from mlc.log import TuningLog
from mlc.measure import LocalMeasurer, MeasureOptions
from mlc.target import resolve
from mlc.tune import TuneOptions, tune_tasks

def product(m, n, k):
    a, b = te.placeholder((m, k), name="A"), te.placeholder((k, n), name="B")
    r = te.reduce_axis((0, k), name="r")
    c = te.compute((m, n), lambda i, j: te.sum(a[i, r] * b[r, j], axis=[r]), name="C")
    return Task(f"product_{m}", normalise(te.create_prim_func([a, b, c])), resolve("native", threads=1))

measurer = LocalMeasurer(MeasureOptions(threads=1, min_repeat_seconds=0.001), workers=2)
with TuningLog(sys.argv[1]) as log:
    def acknowledge(event):
        print(log.count(), flush=True)  # an event speaks of what is in the log already
    options = TuneOptions(seed=int(sys.argv[2]), batch=4, strategy="random", confirm_rounds=2)
    tasks = [product(m, 96, 64) for m in (48, 60, 72, 96, 120, 132, 144, 156, 168, 180)]
    tune_tasks(tasks, resolve("native", threads=1), log, options, measurer, acknowledge)
"""


def _acknowledged(path: Path, seed: int, rng: random.Random) -> int:
    """Start a run, kill it at a random moment after its first record; the last count that it acknowledged."""
    with subprocess.Popen([sys.executable, "-c", RUN, str(path), str(seed)], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        counts = [int(run.stdout.readline())]
        deadline = time.monotonic() + rng.uniform(0.5, 4.0)
        os.set_blocking(run.stdout.fileno(), False)
        while time.monotonic() < deadline and run.poll() is None:
            time.sleep(0.01)
        run.send_signal(signal.SIGKILL)
        os.set_blocking(run.stdout.fileno(), True)
        counts += [int(line) for line in run.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
        run.wait()
    return counts[-1]


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_hundred_killed_runs_lose_no_acknowledged_record(tmp_path: Path) -> None:
    path, rng = tmp_path / "log.db", random.Random(11)
    acknowledged = 0
    for kill in range(KILLS):
        last = _acknowledged(path, kill, rng)
        with TuningLog(path) as log:
            count = log.count()
        assert count >= last >= acknowledged, "a run sees all that earlier ones had acknowledged"
        acknowledged = last
    assert acknowledged > KILLS
    assert check(path).ok
