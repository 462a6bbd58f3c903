"""One tuner on one kernel in a process of its own, and the harness that times what tuners found.

    python -m tests.performance.tuners [--target T] [--threads N] tune TUNER KERNEL SEED TRIALS FOLDER
    python -m tests.performance.tuners [--target T] [--threads N] time KERNEL OUTPUT FOLDER...

``tune`` leaves ``FOLDER/run.json``: when each trial's result was there and what the tuner measured, and each schedule
that was the best so far. The clock starts once everything is imported and every process has started; where
MetaSchedule starts its builders anew for each batch, that import is taken off its clock too. ``time`` times all of the
schedules in ``FOLDER``s in turn, whoever found them.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import numpy as np

from mlc.config import physical_cores
from mlc.target import Target, resolve
from tests.performance.kernel import Kernel
from tests.performance.kernels import tuner_kernels
from tests.performance.results import write_whole

__all__ = ["Run", "Step", "Trial", "main", "read_run"]

_ROUNDS = 15  # turns of each schedule
_SHORTEST = 0.005  # seconds of one turn
_TOLERANCE = 2e-5  # largest error, relative to the largest value of the float64 reference
_BUILD_TIMEOUT = 120.0  # of MetaSchedule's builders, whose default of 30 s a busy import alone can use up


@dataclass(frozen=True)
class Trial:
    """``at`` seconds after the start the tuner knew that this candidate takes ``seconds``; None: it failed."""

    at: float
    seconds: float | None


@dataclass(frozen=True)
class Step:
    """After ``trial`` trials and ``at`` seconds the schedule in ``file`` was the tuner's best."""

    trial: int
    at: float
    file: str


@dataclass
class Run:
    """What one tuner did; ``stopped`` says why it ended, where it says so."""

    tuner: str
    kernel: str
    seed: int
    seconds: float = 0.0
    stopped: str = ""
    trials: list[Trial] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        write_whole(folder / "run.json", json.dumps(asdict(self)))


def read_run(folder: Path) -> Run:
    """Inverse of :meth:`Run.write`."""
    fields = json.loads((folder / "run.json").read_text())
    fields["trials"] = [Trial(**t) for t in fields["trials"]]
    fields["steps"] = [Step(**s) for s in fields["steps"]]
    return Run(**fields)


class _Recorder:
    """Notes trials as they come, and keeps the schedules that were the best so far."""

    def __init__(self, run: Run, folder: Path) -> None:
        self._run, self._folder, self._best = run, folder, math.inf

    def note(self, at: float, seconds: float | None, module: Callable[[], Any]) -> None:
        self._run.trials.append(Trial(at, seconds))
        if seconds is not None and seconds < self._best:
            self._best = seconds
            self.keep(len(self._run.trials), at, module())

    def keep(self, trial: int, at: float, module: Any) -> None:
        import tvm

        name = f"step{len(self._run.steps)}.json"
        (self._folder / name).write_text(tvm.ir.save_json(module))
        self._run.steps.append(Step(trial, at, name))


# -- the tuners


def _tune_mlc(kernel: Kernel, seed: int, trials: int, target: Target, folder: Path) -> Run:
    """``mlc.tune`` on one task with an empty log."""
    import xgboost  # noqa: F401  (an import that a run would do within its first batches)

    from mlc.graph.task import Task, normalise
    from mlc.log import TuningLog
    from mlc.measure import LocalMeasurer, MeasureOptions
    from mlc.tuning import TuneOptions, tune_tasks
    from schedules.trace import replay

    task = Task(kernel.name, normalise(kernel.build(target)), target)
    run = Run("mlc", kernel.name, seed)
    recorder = _Recorder(run, folder)
    measurer = LocalMeasurer(MeasureOptions(threads=target.threads), target.threads)
    try:
        measurer.wait_until_ready()
        with TuningLog(folder / "log.db") as log:
            started, wall = time.perf_counter(), time.time()
            report = tune_tasks([task], target, log, TuneOptions(trials=trials, seed=seed), measurer)
            run.seconds, run.stopped = time.perf_counter() - started, report.tasks[0].stopped or report.reason
            for record in log.records(task.key):
                if record.verdict is None:
                    recorder.note(record.when - wall, record.seconds if record.ok else None,
                                  lambda record=record: replay(task.func, record.trace).mod)
            best = log.best(task.key)
            if best is not None:  # what the last comparison chose
                recorder.keep(len(run.trials), run.seconds, replay(task.func, best.trace).mod)
    finally:
        measurer.close()
    return run


def _tune_metaschedule(kernel: Kernel, seed: int, trials: int, target: Target, folder: Path) -> Run:
    """``meta_schedule.tune_tir`` with its defaults; all that differs is that the builders' imports are not timed."""
    import tvm
    import tvm.s_tir.tensor_intrin
    from tvm.ir.utils import derived_object
    from tvm.s_tir import meta_schedule as ms

    from mlc.graph.task import normalise

    run = Run("metaschedule", kernel.name, seed)
    recorder = _Recorder(run, folder)
    builder, runner = _warm_builder(), ms.runner.LocalRunner(timeout_sec=_BUILD_TIMEOUT)
    started = time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - started - builder.paused[0]

    @derived_object
    class Notes(ms.measure_callback.PyMeasureCallback):  # type: ignore[misc]
        def apply(self, task_scheduler, task_id, measure_candidates, builder_results, runner_results):  # type: ignore[no-untyped-def]
            at = clock()
            for candidate, result in zip(measure_candidates, runner_results, strict=True):
                times = [float(t) for t in result.run_secs] if result.error_msg is None else []
                recorder.note(at, median(times) if times else None, lambda c=candidate: c.sch.mod)

    ms.tune_tir(
        tvm.IRModule({"main": normalise(kernel.build(target))}), target.tvm, str(folder / "work"), trials,
        builder=builder, runner=runner, seed=seed,
        measure_callbacks=[Notes(), *ms.measure_callback.MeasureCallback.create("default")],
    )
    run.seconds = clock()
    run.stopped = "trials" if len(run.trials) >= trials else "finished"
    return run


def _warm_builder() -> Any:
    """MetaSchedule's LocalBuilder, whose new processes import before the batch's clock goes on; see ``paused``."""
    from tvm.ir.utils import derived_object
    from tvm.s_tir.meta_schedule.builder.builder import BuilderResult, PyBuilder
    from tvm.s_tir.meta_schedule.builder.local_builder import _worker_func
    from tvm.s_tir.meta_schedule.utils import cpu_count
    from tvm.support.popen_pool import PopenPoolExecutor, StatusKind

    paused = [0.0]

    @derived_object
    class WarmBuilder(PyBuilder):  # type: ignore[misc]
        def build(self, build_inputs):  # type: ignore[no-untyped-def]
            began = time.perf_counter()
            workers = cpu_count(logical=True)
            pool = PopenPoolExecutor(max_workers=workers, timeout=_BUILD_TIMEOUT)
            for ready in [pool.submit(_import_builder) for _ in range(workers)]:
                ready.result()
            paused[0] += time.perf_counter() - began
            inputs = [(None, None, each.mod, each.target, None) for each in build_inputs]
            results = []
            for answer in pool.map_with_error_catching(lambda x: _worker_func(*x), inputs):
                built = answer.status == StatusKind.COMPLETE
                results.append(BuilderResult(answer.value if built else None, None if built else str(answer.value)))
            pool.shutdown()
            return results

    builder = WarmBuilder()
    builder.paused = paused
    return builder


def _import_builder() -> None:
    import tvm.s_tir.meta_schedule  # noqa: F401

    # what a build imports besides: the tensor instructions of every target, half a minute in which nothing is done that
    # a float32 kernel on a CPU needs
    sys.modules.setdefault("tvm.s_tir.tensor_intrin", ModuleType("tvm.s_tir.tensor_intrin"))
    time.sleep(1.0)  # so that each job gets a process of its own


# -- the harness


def _time_steps(kernel: Kernel, target: Target, folders: Sequence[Path]) -> dict[str, list[float]]:
    """Seconds of every step of every run, timed in turn; raises ``ValueError`` where one computes wrong numbers."""
    import tvm

    from mlc.graph.task import normalise

    params = normalise(kernel.build(target)).params
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal([int(d) for d in p.shape], dtype="float32") for p in list(params)[:-1]]
    expected = kernel.reference(*(a.astype("float64") for a in inputs))
    arguments = [tvm.runtime.tensor(a) for a in (*inputs, np.zeros(expected.shape, "float32"))]
    timers: list[tuple[str, Callable[[int], float]]] = []
    for folder in folders:
        run = read_run(folder)
        for step in run.steps:
            built = _build(tvm.ir.load_json((folder / step.file).read_text()), run.tuner, target.tvm)
            arguments[-1].copyfrom(np.full(expected.shape, np.nan, "float32"))
            built["main"](*arguments)
            error = float(np.abs(arguments[-1].numpy() - expected).max() / np.abs(expected).max())
            if not error <= _TOLERANCE:
                raise ValueError(f"{folder}/{step.file} must be within {_TOLERANCE} of float64's, got {error:.1e}")
            timers.append((folder.name, _timer(built, arguments)))
    counts = [max(1, math.ceil(_SHORTEST / min(timer(1), timer(1)))) for _, timer in timers]
    samples: list[list[float]] = [[] for _ in timers]
    order = list(range(len(timers)))
    for _ in range(_ROUNDS):
        random.Random(len(samples[0])).shuffle(order)
        for i in order:
            timers[i][1](1)  # brings its code and temporaries back into the caches
            samples[i].append(timers[i][1](counts[i]))
    found: dict[str, list[float]] = {folder.name: [] for folder in folders}
    for (name, _), times in zip(timers, samples, strict=True):
        found[name].append(median(times))
    return found


def _build(module: Any, tuner: str, target: Any) -> Any:
    """Compile a scheduled module as its tuner's own compiler does."""
    import tvm

    if tuner == "mlc":
        from schedules.lowering import PIPELINE
        from schedules.math import expand_math

        func = expand_math(module["main"]).with_attr("global_symbol", "main")
        with target:
            return tvm.compile(tvm.IRModule({"main": func}), target, tir_pipeline=PIPELINE).jit()
    from tvm.s_tir.transform import RemoveWeightLayoutRewriteBlock

    func = module["main"].with_attr("global_symbol", "main")
    lowered = RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(tvm.IRModule({"main": func}))
    with target:
        return tvm.compile(lowered, target).jit()


def _timer(built: Any, arguments: Sequence[Any]) -> Callable[[int], float]:
    import tvm

    def seconds(number: int) -> float:
        return float(built.time_evaluator("main", tvm.cpu(), number=number, repeat=1)(*arguments).results[0])

    return seconds


def main(argv: Sequence[str] | None = None) -> int:
    """See the head of this file."""
    from mlc import threads as pool

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="native", help="a CPU target that this machine can run")
    parser.add_argument("--threads", type=int, default=physical_cores())
    jobs = parser.add_subparsers(dest="job", required=True)
    one = jobs.add_parser("tune", help="leave FOLDER/run.json and the schedules that were the best so far")
    one.add_argument("tuner", choices=_TUNERS)
    one.add_argument("kernel")
    one.add_argument("seed", type=int)
    one.add_argument("trials", type=int)
    one.add_argument("folder", type=Path)
    every = jobs.add_parser("time", help="time the schedules of all FOLDERs in turn")
    every.add_argument("kernel")
    every.add_argument("output", type=Path)
    every.add_argument("folders", type=Path, nargs="+")
    args = parser.parse_args(argv)
    pool.configure(args.threads)
    target = resolve(args.target, threads=args.threads)
    kernel = next(kernel for kernel in tuner_kernels() if kernel.name == args.kernel)
    if args.job == "time":
        write_whole(args.output, json.dumps(_time_steps(kernel, target, args.folders)))
    else:
        _TUNERS[args.tuner](kernel, args.seed, args.trials, target, args.folder).write(args.folder)
    return 0


_TUNERS = {"mlc": _tune_mlc, "metaschedule": _tune_metaschedule}


if __name__ == "__main__":
    sys.exit(main())
