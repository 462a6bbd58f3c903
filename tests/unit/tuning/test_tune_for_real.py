"""One short run with real workers: what is found builds, is correct, and is what the log gives back."""

from __future__ import annotations

from pathlib import Path

import pytest
from tvm import te

from mlc.graph.task import Task, normalise
from mlc.log import TuningLog
from mlc.measure import LocalMeasurer, MeasureOptions
from mlc.target import resolve
from mlc.tuning import TuneOptions, tune_tasks
from mlc.tuning.events import BatchMeasured, Event
from schedules.trace import replay

pytestmark = pytest.mark.alone


@pytest.mark.timeout(240)
def test_a_small_product_is_tuned_on_this_machine(tmp_path: Path) -> None:
    target = resolve("native", threads=1)
    a, b = te.placeholder((96, 96), name="A"), te.placeholder((96, 128), name="B")
    r = te.reduce_axis((0, 96), name="r")
    c = te.compute((96, 128), lambda i, j: te.sum(a[i, r] * b[r, j], axis=[r]), name="C")
    task = Task("matmul", normalise(te.create_prim_func([a, b, c])), target, weight=3)
    events: list[Event] = []
    measurer = LocalMeasurer(MeasureOptions(threads=1, min_repeat_seconds=0.002), workers=2)
    try:
        with TuningLog(tmp_path / "log.db") as log:
            options = TuneOptions(trials=16, batch=6, confirm_rounds=8)
            report = tune_tasks([task], target, log, options, measurer, events.append)
            (found,) = report.tasks
            best = log.best(task.key)
            records = list(log.records(task.key))
    finally:
        measurer.close()
    # a product this small may reach its roofline before the budget ends
    assert report.trials == found.trials and (found.trials == 16 or found.stopped)
    assert not {"wrong", "crash"} & set(found.failures)
    assert best is not None and best.seconds == found.best_seconds < 0.05
    # on a machine that does other things a baseline may be slow while a candidate is not
    assert found.best_seconds > 0 and 0 < found.roofline_fraction < 10
    assert found.verdict in ("tuned", "default")
    # a candidate whose code was timed before is no trial, so that there may be more batches
    assert sum(isinstance(e, BatchMeasured) for e in events) >= -(-found.trials // 6)
    assert all(r.code for r in records if r.ok)
    assert replay(task.func, best.trace).mod is not None
