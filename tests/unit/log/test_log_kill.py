"""Writers killed at random moments: the log opens, and what was acknowledged is there."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from mlc.log import TuningLog, check

WRITER = """
import sys
from dataclasses import replace
from mlc.log import TuningLog
from log_records import record
path, writer = sys.argv[1:]
with TuningLog(path) as log:
    session = log.start_session({"writer": writer}, writer)
    for trial in range(0, 1_000_000, 3):
        log.append([record(trial + i, session=writer) for i in range(3)], replace(session, trials=trial + 3))
        sys.stdout.write(f"{trial + 2}\\n")
        sys.stdout.flush()
"""


def _acknowledged_until_killed(path: Path, name: str, rng: random.Random) -> dict[str, int]:
    """Run two writers, kill both at a random moment; the last trial that each acknowledged, -1 for none."""
    writers = {
        f"{name}{letter}": subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), f"{name}{letter}"], stdout=subprocess.PIPE, text=True,
            cwd=Path(__file__).parent,
        )
        for letter in "ab"
    }
    first = next(iter(writers.values()))
    assert first.stdout is not None
    acknowledged = {session: -1 for session in writers}
    acknowledged[f"{name}a"] = int(first.stdout.readline())  # it is at work now
    time.sleep(rng.uniform(0, 0.08))
    for writer in writers.values():
        writer.send_signal(signal.SIGKILL)
    for session, writer in writers.items():
        lines = [line for line in writer.communicate()[0].splitlines(keepends=True) if line.endswith("\n")]
        acknowledged[session] = int(lines[-1]) if lines else acknowledged[session]
    return acknowledged


def test_twenty_kills_lose_no_acknowledged_record(tmp_path: Path) -> None:
    path, rng = tmp_path / "log.db", random.Random(0)
    acknowledged: dict[str, int] = {}
    for kill in range(20):
        acknowledged |= _acknowledged_until_killed(path, f"run{kill}", rng)
        with TuningLog(path) as log:
            trials = {session: {r.trial for r in log.records(session=session)} for session in acknowledged}
            spent = {session.id: session.trials for session in log.sessions()}
        for session, last in acknowledged.items():
            assert set(range(last + 1)) <= trials[session], session
            assert spent.get(session, 0) == len(trials[session]), "a batch and its session's count go together"
    assert sum(acknowledged.values()) > 100
    assert check(path).ok
