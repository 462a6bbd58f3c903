"""What must never come of a damaged file is seen from outside the process that reads it."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from mlc.errors import LogError
from tests.fuzz.harness import Case, Outcome, cases, main, run, table


def _check(case: Case) -> Outcome:
    """Behave as the case's strategy is called."""
    began = time.process_time()
    match case.strategy:
        case "refuse":
            raise LogError("it must hold, but does not; mend it")
        case "two lines":
            raise LogError("it must hold,\nbut does not")
        case "signal":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "leave":
            os._exit(3)
        case "hang":
            time.sleep(60)
        case "toil":
            while time.process_time() < began + 0.8:
                pass
        case "raise":
            raise KeyError("name")
        case "grow":
            bytearray(1 << 30)
        case "complain":
            print("Traceback (most recent call last):\nSomeError: in a thread", file=sys.stderr)
        case "chatter":
            print("not to be seen")
    return Outcome.WRONG if case.strategy == "err" else Outcome.RIGHT


@pytest.mark.parametrize(("strategy", "outcome", "detail"), [
    ("fit", Outcome.RIGHT, ""),
    ("chatter", Outcome.RIGHT, ""),
    ("err", Outcome.WRONG, ""),
    ("refuse", Outcome.REFUSED, "it must hold, but does not; mend it"),
    ("two lines", Outcome.REFUSED, "it must hold, but does not"),
    ("signal", Outcome.CRASHED, "SIGSEGV"),
    ("leave", Outcome.CRASHED, "exit status 3"),
    ("hang", Outcome.HUNG, ""),
    ("toil", Outcome.HUNG, ""),
    ("raise", Outcome.TRACEBACK, "KeyError at _check:"),
    ("grow", Outcome.TRACEBACK, "MemoryError at _check:"),
    ("complain", Outcome.TRACEBACK, "SomeError: in a thread"),
])
def test_outcomes(strategy: str, outcome: Outcome, detail: str) -> None:
    seconds = 0.5 if strategy in ("hang", "toil") else 20.0
    (verdict,) = run([Case(strategy, 0)], _check, seconds=seconds, extra_bytes=1 << 29)
    assert verdict.outcome is outcome and verdict.detail.startswith(detail), verdict


def test_one_bad_case_fails_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "refuse"], _check, ["--count", "5"]) == 0
    assert main(["fit", "err"], _check, ["--count", "3", "--seed", "2"]) == 1
    out = capfd.readouterr().out
    assert "err 2000000: wrong" in out and "not to be seen" not in out


def test_what_was_noted_is_not_checked_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--verbose", "--state", str(tmp_path / "new" / "state.jsonl")]
    assert main(["fit", "err"], _check, ["--count", "2", *words]) == 1
    with (tmp_path / "new" / "state.jsonl").open("a", encoding="utf-8") as file:
        file.write('["fit", 1, "RI')  # killed while it wrote
    capfd.readouterr()
    assert main(["fit", "err"], _check, ["--count", "4", *words]) == 1
    out = capfd.readouterr().out
    assert "fit 0:" not in out and "err 0: wrong" in out, "what went wrong is looked at again"
    assert "fit 1: right" in out and out.splitlines()[-1].split()[:2] == ["all", "4"]


def test_table_and_dealing() -> None:
    dealt = cases(["fit", "err"], 5, seed=1)
    assert [(c.strategy, c.seed) for c in dealt] == [
        ("fit", 1000000), ("err", 1000000), ("fit", 1000001), ("err", 1000001), ("fit", 1000002)]
    assert dealt[0].rng().random() == cases(["fit"], 1, seed=1)[0].rng().random() != dealt[1].rng().random()
    last = table(run(dealt, _check)).splitlines()[-1].split()
    assert last == ["all", "5", "0", "3", "2", "0", "0", "0"]
