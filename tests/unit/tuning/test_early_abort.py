"""A run whose first candidates all fail alike ends early, with the likely cause in one line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from tuning_tasks import TARGET, matmul

from mlc.errors import MeasureError
from mlc.log import TuningLog
from mlc.measure.measurer import MeasureResult
from mlc.target import resolve
from mlc.testing.misbehaving import Refuser
from mlc.tuning import TuneOptions, TuneReport, tune_tasks
from mlc.tuning.early_abort import FirstResults
from mlc.tuning.events import Event, Finished

ILLEGAL = MeasureResult(failure="crash", detail="the worker ended with SIGILL")
WORKED = MeasureResult(times=(1e-3,))


pytestmark = pytest.mark.usefixtures("small_space")


def _run(log: TuningLog, measurer: Refuser, sizes: Sequence[int], events: list[Event], trials: int = 100) -> TuneReport:
    tasks = [matmul(size, 64, 32) for size in sizes]
    return tune_tasks(tasks, TARGET, log, TuneOptions(trials=trials), measurer, events.append)


@pytest.mark.parametrize(("sizes", "functions"), [
    ((64, 128, 32, 16), 3), ((64, 128), 2), ((64,), 1),
], ids=["many", "two", "one"])
def test_the_run_ends_and_the_log_has_what_failed(sizes: Sequence[int], functions: int, tmp_path: Path) -> None:
    measurer, events = Refuser("crash", "the worker ended with SIGILL"), list[Event]()
    with TuningLog(tmp_path / "log.db") as log:
        with pytest.raises(MeasureError, match=r"all 4 failed \(4 crash: SIGILL\), of") as caught:
            _run(log, measurer, sizes, events)
        assert "\n" not in str(caught.value) and "--target x86-64-v3" in str(caught.value)
        records = list(log.records())
        assert len(records) == len(measurer.measured) == 4
        assert len({record.task_key for record in records}) == functions
        assert [s.options["reason"] for s in log.sessions()] == ["failing"]
    assert isinstance(events[-1], Finished) and events[-1].report.reason == "failing"


def test_one_candidate_that_works_is_enough(tmp_path: Path) -> None:
    """The ones that were put off are measured too."""
    measurer = Refuser("crash", "the worker ended with SIGILL", works=lambda number: number == 3)
    with TuningLog(tmp_path / "log.db") as log:
        report = _run(log, measurer, (64, 128, 32), [], trials=40)
    assert (report.reason, report.trials) == ("trials", 40)
    assert len({(r.task_key, r.trace) for r in measurer.measured}) == 40


def test_failures_of_two_kinds_are_no_verdict() -> None:
    first = FirstResults(TARGET, 3)
    first.note("a", [ILLEGAL, ILLEGAL])
    first.note("b", [MeasureResult(failure="crash", detail="the worker ended with SIGSEGV")] * 2)
    first.note("c", [ILLEGAL, ILLEGAL])
    assert not first.open and not first.hopeless


def test_a_few_functions_are_asked_before_a_verdict() -> None:
    first = FirstResults(TARGET, 9)
    for number in range(2):
        first.note(str(number), [ILLEGAL] * 8)
        assert first.open and not first.hopeless and first.seen(str(number)) and not first.seen("2")
    first.note("2", [ILLEGAL])
    assert first.hopeless and not first.seen("0")


def test_what_worked_once_is_never_hopeless() -> None:
    first = FirstResults(TARGET, 1)
    first.note("a", [WORKED, ILLEGAL])
    first.note("a", [ILLEGAL] * 8)
    assert not first.open and not first.hopeless


@pytest.mark.parametrize(("failure", "detail", "says"), [
    ("build", "OSError: [Errno 28] No space left on device", "no space is left.*TMPDIR"),
    ("build", "No module named 'tvm.script'", "the workers' Python lacks.*`mlc doctor`"),
    ("build", "Check failed: lanes", r"code generation refuses every candidate.*\(Check failed: lanes\)"),
    ("crash", "the worker ended with SIGKILL", "memory has run out"),
    ("crash", "the worker ended with SIGSEGV", r"4 crash: SIGSEGV\).*`mlc doctor`"),
    ("run", "the task's reference output could not be computed (the worker ended with SIGILL)", "lacks"),
    ("timeout", "no answer after 10 s", "too busy or too slow"),
    ("wrong", "output 0 differs by 0.3", "other numbers than the reference"),
], ids=lambda value: value.split()[0] if isinstance(value, str) else None)
def test_the_cause_is_named(failure: str, detail: str, says: str) -> None:
    first = FirstResults(TARGET, 1)
    first.note("a", [MeasureResult(failure=failure, detail=detail)] * 4)
    assert first.hopeless
    with pytest.raises(MeasureError, match=says) as caught:
        raise MeasureError(first.diagnosis())
    assert "\n" not in str(caught.value)


def test_the_instructions_that_the_cpu_lacks_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from mlc import cpu

    (tmp_path / "cpuinfo").write_text("flags : sse3 ssse3 avx avx2 fma\n")
    monkeypatch.setenv("MLC_CPUINFO", str(tmp_path / "cpuinfo"))
    cpu.host_cpu.cache_clear()
    first = FirstResults(resolve("llvm -mtriple=x86_64-linux-gnu -mcpu=x86-64-v4"), 1)
    first.note("a", [ILLEGAL] * 4)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert "avx512f" in first.diagnosis() and "avx2" not in first.diagnosis()
    monkeypatch.undo()
    cpu.host_cpu.cache_clear()
