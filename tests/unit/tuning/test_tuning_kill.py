"""Tuning runs and their workers killed at random moments: the log keeps what was acknowledged, the next run goes on."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from killed_run import BEGINNING

from mlc.log import TuningLog, check

KILLS = 100
#: trials that the last run, which nobody kills, is given beyond what was spent by then
MORE = 24
RUN = BEGINNING + """
from mlc.measure import LocalMeasurer, MeasureOptions

with TuningLog(sys.argv[1]) as log:
    with LocalMeasurer(MeasureOptions(threads=1, min_repeat_seconds=0.001), workers=2) as measurer:
        def acknowledge(event):
            print(log.count(), flush=True)  # an event speaks of what is in the log already
        options = TuneOptions(trials=int(sys.argv[2]), seed=1, batch=4, resume=True, confirm_rounds=2)
        report = tune_tasks(tasks, target, log, options, measurer, acknowledge)
        print(report.reason, report.trials, flush=True)
"""


def _start(path: Path, trials: int) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", RUN, str(path), str(trials)], stdout=subprocess.PIPE, text=True)


def _acknowledged(path: Path, rng: random.Random) -> tuple[int, list[psutil.Process]]:
    """Start a run and kill it at a random moment; the last count that it acknowledged, 0 for none, and its workers.

    Most are killed when they are at work, some while they start. Half of the time the workers are killed with it.
    """
    with _start(path, 10**6) as run:
        assert run.stdout is not None
        counts = []
        patience = rng.uniform(0.1, 2.5)
        if rng.random() > 0.15:
            counts.append(int(run.stdout.readline()))
            patience = rng.uniform(0.05, 3.0)
        time.sleep(patience)
        workers = psutil.Process(run.pid).children(recursive=True)
        for process in [run, *(workers if rng.random() < 0.5 else [])]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        counts += [int(line) for line in run.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
        assert run.wait() == -signal.SIGKILL, "it would have gone on for ever"
    return max(counts, default=0), workers


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_killed_runs_lose_no_acknowledged_record(tmp_path: Path) -> None:
    path, rng = tmp_path / "log.db", random.Random(11)
    known, resumed, orphans = 0, 0, []
    for _ in range(KILLS):
        last, workers = _acknowledged(path, rng)
        orphans += workers
        report = check(path) if path.exists() else None
        assert report is None or report.ok, report
        count = 0 if report is None else report.records
        assert count >= max(last, known), "all that was acknowledged is there, and stays there"
        known = count
        if report is not None:
            with TuningLog(path) as log:
                trials = [r.trial for r in log.records() if r.verdict is None]
                spent = [session.trials for session in log.sessions()]
            assert sorted(trials) == list(range(1, len(trials) + 1)), "a run goes on where the last one was killed"
            assert max(spent, default=0) == len(trials), "records and the budget that they used up go together"
            resumed += len(trials) > 0
    assert resumed > KILLS / 2 and known > KILLS
    with _start(path, len(trials) + MORE) as run:
        assert run.stdout is not None
        assert run.stdout.read().splitlines()[-1] == f"trials {MORE}" and run.wait() == 0
    assert check(path).ok
    assert not psutil.wait_procs(orphans, timeout=15)[1], "workers end when their parent is gone"
