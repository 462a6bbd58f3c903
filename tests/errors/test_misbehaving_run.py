"""A whole tuning run on real candidates of which a tenth crash, hang or compute something else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import tvm
from tvm import te

from mlc.graph.task import Task, normalise, to_json
from mlc.log import TuningLog, check
from mlc.measure import LocalMeasurer, MeasureOptions, MeasureRequest
from mlc.measure.lowered import compile_hashed
from mlc.target import resolve
from mlc.testing.misbehaving import FAILURES, Saboteur, fate_of, spoilt
from mlc.tuning import TuneOptions, tune_tasks
from mlc.tuning.events import BatchMeasured, Event
from schedules import registry
from schedules.space import best_seed
from schedules.trace import replay

pytestmark = pytest.mark.alone

TARGET = resolve("native", threads=1)
OPTIONS = MeasureOptions(threads=1, timeout=3.0, min_repeat_seconds=0.001)
TRIALS = 1000
#: trials after which memory is taken to be what it stays at: the cost model's trees and every worker's data are there
SETTLED = 300


def product(m: int, n: int = 96, k: int = 64) -> Task:
    a, b = te.placeholder((m, k), name="A"), te.placeholder((k, n), name="B")
    r = te.reduce_axis((0, k), name="r")
    c = te.compute((m, n), lambda i, j: te.sum(a[i, r] * b[r, j], axis=[r]), name="C")
    return Task(f"product_{m}", normalise(te.create_prim_func([a, b, c])), TARGET)


def outputs(task: Task, trace: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """What the schedule that ``trace`` describes computes."""
    module, _ = compile_hashed(replay(task.func, trace).mod["main"], TARGET.tvm)
    arguments = [tvm.runtime.tensor(x) for x in (a, b, np.zeros((a.shape[0], b.shape[1]), "float32"))]
    module["main"](*arguments)
    return arguments[-1].numpy()


class Memory:
    """Resident bytes of this process and of its workers at each batch, by the trials that were made."""

    def __init__(self, log: Path) -> None:
        self.path, self.own, self.workers = log, dict[int, int](), dict[int, int]()
        self.lost: list[str] = []
        self._last = 0

    def __call__(self, event: Event) -> None:
        if not isinstance(event, BatchMeasured) or event.trials < self._last + 40:
            return
        self._last = event.trials
        this = psutil.Process()
        self.own[event.trials] = this.memory_info().rss
        self.workers[event.trials] = max((c.memory_info().rss for c in this.children(recursive=True)), default=0)
        with TuningLog(self.path, readonly=True) as reader:
            if reader.count() < event.trials:
                self.lost.append(f"{reader.count()} records after {event.trials} trials")


def growth(sizes: dict[int, int]) -> float:
    """The largest of the sizes after :data:`SETTLED` trials over the largest until then."""
    early = max(size for trials, size in sizes.items() if trials <= SETTLED)
    return max(size for trials, size in sizes.items() if trials > SETTLED) / early


def test_a_spoilt_candidate_fails_as_it_should() -> None:
    with LocalMeasurer(OPTIONS, workers=1) as measurer:
        task = product(24)
        space = registry.find(task.func, TARGET.tvm)
        good = best_seed(space, task.func, TARGET.tvm).mod["main"]
        candidates = [good, *(spoilt(good, failure) for failure in FAILURES)]
        results = measurer.measure([
            MeasureRequest(task.key, to_json(task.func), TARGET.attrs, "", to_json(f)) for f in candidates
        ])
    assert [r.failure for r in results] == ["", *FAILURES]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_run_in_which_a_tenth_of_the_candidates_misbehave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """No record is lost, nothing wrong is accepted, the run goes on to its end, and memory stays flat."""
    monkeypatch.setattr("mlc.tuning.allocation.PATIENCE", 10_000)
    monkeypatch.setattr("mlc.tuning.allocation.FAILING", 10_000)
    monkeypatch.setattr("mlc.tuning.allocation.NEAR", 1e9)
    tasks = [product(m) for m in (96, 120, 168, 192)]
    path = tmp_path / "log.db"
    memory = Memory(path)
    with LocalMeasurer(OPTIONS, workers=2) as inner, TuningLog(path) as log:
        report = tune_tasks(tasks, TARGET, log, TuneOptions(trials=TRIALS), Saboteur(inner), memory)
        records = [r for r in log.records() if r.verdict is None]
        best = {task.key: log.best(task.key) for task in tasks}
    assert report.reason == "trials" and report.trials == TRIALS == len(records) and not memory.lost
    assert check(path).records == report.measured
    # a busy machine may make any candidate late, but never a bad one right
    failures = Counter((fate_of(r.trace), r.failure) for r in records)
    assert all(failure in (fate, "timeout") for fate, failure in failures)
    assert failures["", "timeout"] < TRIALS / 100
    assert all(failures[failure, failure] > TRIALS / 100 for failure in FAILURES)
    rng = np.random.default_rng(0)
    for task in tasks:
        a, b = (rng.standard_normal([int(n) for n in p.shape], "float32") for p in task.func.params[:2])
        record = best[task.key]
        assert record is not None and not fate_of(record.trace)
        np.testing.assert_allclose(outputs(task, record.trace, a, b), a @ b, rtol=1e-4, atol=1e-4)
    for name, value in {"seconds": report.seconds, "failures": report.failures, "session": memory.own,
                        "workers": memory.workers}.items():
        record_property(name, value)
    assert growth(memory.own) < 1.1 and growth(memory.workers) < 1.1
