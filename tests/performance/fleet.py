"""A fleet by simulation: how busy devices are, what the session itself costs, and what searching in parallel loses.

    python -m tests.performance.fleet [--output FOLDER] [--nodes 1 4 16 64 256 1000] [--workers 8 16 32] [--publish]

Devices sleep in virtual time: 0.3 s a candidate, 2% of the jobs lost, 5% of the devices die, one is ten times slower.
The session is the real one (allocation, strategies, dispatch, log), on surrogate functions: a point of their space
has a time and costs nothing to schedule, so that what is left is the session itself. The processor time that it takes
passes for the devices too: a session that cannot keep up leaves them idle. What it costs to propose candidates of real
functions (schedules are replayed and their features read, in TVM) is left out here, and is far more than all else.

Then one GPU, whose candidates so many workers of its machine build in 1 to 8 s each, and which runs one at a time for
0.1 s: batch after batch, as on a CPU, and as they come (:mod:`mlc.measure.stream`). Here the session takes no time.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from unittest.mock import patch

import numpy as np
from tvm import te

from cost_model.model import Sample
from mlc.graph.task import Task, normalise
from mlc.log import TuningLog
from mlc.measure.dispatch import Dispatcher
from mlc.measure.fleet import Fleet
from mlc.measure.local import LocalMeasurer
from mlc.measure.local_executor import LocalExecutor
from mlc.measure.measurer import MeasureOptions, MeasureRequest, MeasureResult
from mlc.measure.protocol import Message
from mlc.measure.stream import StreamingExecutor, StreamingMeasurer
from mlc.report import plots
from mlc.target import resolve
from mlc.testing.builders import simulated_workers
from mlc.testing.fleet import SimulatedDevices
from mlc.testing.remote import Clock
from mlc.tuning import TuneOptions, session, tune_tasks
from mlc.tuning.candidate import Candidate, Point
from mlc.tuning.search import Search
from schedules import registry
from schedules.space import Knob, Space

#: what the results show
CURVES = Path(__file__).with_name("fleet.svg")
TARGET = resolve("x86-64-v3", threads=2)
SECONDS, LOST, DYING, SLOW = 0.3, 0.02, 0.05, 10.0
TASKS, KNOBS = 40, 8
#: seconds of a GPU's jobs: to build a candidate, from and to, to run it, to compute a task's reference, to draw its
#: inputs in a worker
BUILD, RUN, REFERENCE, INPUTS = (1.0, 8.0), 0.1, 0.5, 0.1
NOISE = 0.02


class Surrogate(Space):
    """Eight knobs of seven powers of two: 5.8 million points."""

    name = "surrogate"
    target_kind = "llvm"

    def matches(self, func, target):  # type: ignore[no-untyped-def]
        return True

    def knobs(self, func, target):  # type: ignore[no-untyped-def]
        return tuple(Knob(f"k{i}", (1, 2, 4, 8, 16, 32, 64)) for i in range(KNOBS))

    def seeds(self, func, target):  # type: ignore[no-untyped-def]
        yield {f"k{i}": 8 for i in range(KNOBS)}

    def schedule(self, sch, target, pick):  # type: ignore[no-untyped-def]
        raise AssertionError("nothing is scheduled here")


class SurrogateSearch(Search):
    """Points instead of schedules; no cost model, so that the comparison is of the search alone."""

    def __init__(self, *args, **options) -> None:  # type: ignore[no-untyped-def]
        with patch("mlc.tuning.candidate.TaskSpace.realise", realise):
            super().__init__(*args, **options)
        self.space.realise = lambda point: realise(self.space, point)  # type: ignore[method-assign]

    def _score(self, candidates: Sequence[Candidate]) -> np.ndarray:
        return np.zeros(len(candidates))

    def _samples(self, candidates: Sequence[Candidate], seconds: Sequence[float]) -> list[Sample]:
        return []


def realise(space, point: Point) -> Candidate:  # type: ignore[no-untyped-def]
    """A candidate whose trace is as long as a real one's and names its point."""
    decisions = dict(zip((k.name for k in space.knobs), point, strict=True))
    return _Coded(space.task, Surrogate.name, decisions, point, None, json.dumps({"point": point, "trace": "x" * 4000}))


class _Coded(Candidate):
    @property
    def code(self) -> int:  # type: ignore[override]
        return hash(self.point)


def task(number: int) -> Task:
    a = te.placeholder((64, 64 + number), name="a")
    func = normalise(te.create_prim_func([a, te.compute(a.shape, lambda i, j: a[i, j] + 1.0, name="b")]))
    return Task(f"task{number}", func, TARGET, 1 + number % 5)


def true_seconds(key: str, point: Point) -> float:
    """A ridged bowl with its best somewhere else for each task: neighbours are alike, and pairs of knobs matter."""
    rng = random.Random(key)
    best = [rng.randrange(7) for _ in point]
    at = [int(math.log2(v)) for v in point]
    distance = sum((a - b) ** 2 for a, b in zip(at, best, strict=True))
    ridges = sum(abs((at[i] - best[i]) - (at[i - 1] - best[i - 1])) for i in range(0, len(at), 2))
    return 1e-3 * (1.0 + 0.03 * distance + 0.1 * ridges)


def run(device: str, request: MeasureRequest, rounds: int) -> MeasureResult:
    return measured(device, request.task_key, request.trace, rounds)


def measured(device: str, task_key: str, trace: str, rounds: int) -> MeasureResult:
    point = tuple(json.loads(trace)["point"])
    seconds = true_seconds(task_key, point)
    noise = random.Random(f"{device}{trace[:120]}{rounds}")
    times = tuple(seconds * (1.0 + NOISE * noise.gauss(0.0, 1.0)) for _ in range(rounds or 3))
    code = blake2b(trace.encode(), digest_size=8).hexdigest()
    return MeasureResult(times, build_seconds=0.2, run_seconds=0.1, code_hash=code)


class Serial:
    """One device, a batch at a time."""

    def measure(self, requests, on_result=None):  # type: ignore[no-untyped-def]
        return [run("here", request, 0) for request in requests]

    def compare(self, requests, rounds):  # type: ignore[no-untyped-def]
        return [run("here", request, rounds) for request in requests]

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Row:
    """``busy`` is the part of their time that living devices worked until the last batch was begun, ``core`` the
    session's seconds of processor for 1,000 results, ``ratio`` the model's time found by that of a serial run with
    the same budget, which ended after ``serial`` trials."""

    nodes: int
    trials: int
    seconds: float
    rate: float
    busy: float
    core: float
    lost: int
    duplicates: int
    ratio: float
    serial: int


def simulate(nodes: int, trials: int, seed: int = 0) -> tuple[Row, float]:
    """One run; the row without the ratio, and the model's seconds by the true times of what it chose."""
    clock = Clock()
    horizon = trials * SECONDS / nodes
    devices = SimulatedDevices(nodes, clock, run, seconds=SECONDS, lost=LOST, dying=DYING, horizon=horizon, seed=seed,
                               slow=SLOW if nodes > 1 else 1.0, charged=True)
    dispatcher = Dispatcher(Fleet(devices, clock=clock), MeasureOptions(threads=2), attempts=8, grace=1e4, clock=clock)
    last, begin, asked = [0.0, 0.0], dispatcher.begin, Counter[tuple[str, str]]()

    def noted(requests, on_result=None):  # type: ignore[no-untyped-def]
        last[:] = [clock.now, devices.utilisation(clock.now) if clock.now else 0.0]
        asked.update((request.task_key, request.trace) for request in requests)
        return begin(requests, on_result)

    dispatcher.begin = noted  # type: ignore[method-assign]
    report, latency = tuned(dispatcher, trials, seed)
    row = Row(nodes, report.trials, clock.now, report.trials / last[0], last[1], 1000 * devices.cpu / report.trials,
              dispatcher.lost, asked.total() - len(asked), math.nan, 0)
    return row, latency


def tuned(measurer, trials: int, seed: int):  # type: ignore[no-untyped-def]
    with tempfile.TemporaryDirectory() as folder, TuningLog(Path(folder) / "log.db") as log, \
            patch.object(registry, "find", lambda func, target: Surrogate()), \
            patch.object(session, "Search", SurrogateSearch):
        tasks = [task(number) for number in range(TASKS)]
        report = tune_tasks(tasks, TARGET, log, TuneOptions(trials=trials, seed=seed, confirm_rounds=0), measurer)
        points = {t.key: log.best(t.key) for t in tasks}
        return report, sum(
            t.weight * true_seconds(t.key, tuple(record.decisions[f"k{i}"] for i in range(KNOBS)))
            for t in tasks if (record := points[t.key]) is not None)


def serial(trials: int, seed: int) -> tuple[float, int]:
    report, latency = tuned(Dispatcher(LocalExecutor(Serial()), MeasureOptions(threads=2)), trials, seed)
    return latency, report.trials


@dataclass(frozen=True)
class Stream:
    """A GPU's rate in trials a second, batch after batch and as candidates come; ``busy`` is the part of the latter
    time that it ran, ``ratio`` the model's time found by that of the batches with as many trials."""

    workers: int
    trials: int
    batches: float
    rate: float
    busy: float
    ratio: float


def job_seconds(kind: str, message: Message) -> float:
    """Of a job of a GPU's worker; builds by what is built."""
    if kind == "build":
        return random.Random(message["trace"][:120]).uniform(*BUILD)
    return {"run": RUN, "reference": REFERENCE, "prepare": INPUTS, "hold": 0.0}[kind]  # a GPU's have no baselines


def built_here(workers: int, trials: int, seed: int, *, streaming: bool) -> tuple[float, float, float, int]:
    """Seconds of the clock, those in which a candidate ran, the model's seconds by the true times, and the trials."""
    clock, options = Clock(), MeasureOptions(threads=2)
    with simulated_workers(clock, job_seconds, lambda m: measured("here", m["task_key"], m["trace"], 0)) as pools:
        executor = (StreamingExecutor(StreamingMeasurer(options, workers)) if streaming
                    else LocalExecutor(LocalMeasurer(options, workers)))
        with Dispatcher(executor, options, grace=1e4, clock=clock) as dispatcher:
            report, latency = tuned(dispatcher, trials, seed)
        return clock.now, pools[0].running, latency, report.trials


def stream(workers: int, trials: int, seed: int = 0) -> Stream:
    seconds, running, found, done = built_here(workers, trials, seed, streaming=True)
    before, _, reference, spent = built_here(workers, trials, seed, streaming=False)
    return Stream(workers, done, spent / before, done / seconds, running / seconds, found / reference)


def plot(rows: Sequence[Row], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.4), layout="constrained")
    axes = figure.subplots(1, 3)
    nodes = [row.nodes for row in rows]
    axes[0].plot(nodes, [100 * row.busy for row in rows], "o-")
    axes[0].axhline(90, color="grey", linestyle=":", label="90%")
    axes[0].set(title="devices at work", ylabel="% of their time", ylim=(0, 102))
    axes[1].loglog(nodes, [row.rate for row in rows], "o-", label="simulated")
    axes[1].loglog(nodes, [n / SECONDS for n in nodes], ":", color="grey", label="all devices busy")
    axes[1].set(title="results a second")
    axes[2].plot(nodes, [row.ratio for row in rows], "o-")
    axes[2].axhline(1.1, color="grey", linestyle=":", label="1.1")
    axes[2].set(title="model's time, by the serial search's", ylim=(0.8, 1.2))
    for axis in axes:
        axis.set_xscale("log")
        axis.set_xlabel("devices")
        axis.grid(alpha=0.3)
        axis.legend()
    file.write_text(plots.svg(figure), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1000])
    parser.add_argument("--workers", type=int, nargs="*", default=[8, 16, 32], help="that build for one GPU")
    parser.add_argument("--trials", type=int, default=8000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("build/fleet"))
    parser.add_argument("--publish", action="store_true", help=f"the curves into {CURVES.name} too")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    reference: dict[int, tuple[float, int]] = {}
    for nodes in args.nodes:
        started = time.monotonic()
        row, latency = simulate(nodes, max(args.trials, 20 * nodes), args.seed)
        if row.trials not in reference:
            reference[row.trials] = serial(row.trials, args.seed)
        best, spent = reference[row.trials]
        rows.append(replace(row, ratio=latency / best, serial=spent))
        print(f"{rows[-1]}  ({time.monotonic() - started:.0f} s)", flush=True)
    (args.output / "fleet.json").write_text(json.dumps([asdict(row) for row in rows], indent=1))
    for file in [args.output / "fleet.svg", *[CURVES] * args.publish]:
        plot(rows, file)
    streams = [stream(workers, args.trials // 8, args.seed) for workers in args.workers]
    print(*streams, sep="\n", flush=True)
    (args.output / "stream.json").write_text(json.dumps([asdict(each) for each in streams], indent=1))


if __name__ == "__main__":
    main()
