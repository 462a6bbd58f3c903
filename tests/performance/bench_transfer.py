"""How many trials what other models have taught saves: whole runs of the tuner with it and without.

    python -m tests.performance.bench_transfer [--models A,B] [--trials N] [--seeds 0,1,2] [--output DIR] [--again]

Each model is tuned with three kinds of knowledge: ``nothing`` (no record and no cost model but the analytic estimate),
``model`` (a cost model trained on the shipped samples of every task that is not the model's) and ``others`` (that, and
the shipped schedules of every task that is not the model's). A machine drifts by more than tuning gains from one trial
to the next, so every distinct candidate is timed once, when a run first asks for it, and has that time in all of them:
runs differ in what they try, not in when. What a model would take after so many trials is the sum of its tasks' best
times until then; an untimed task takes what its untuned schedule takes, and of alternatives the one counts that would
be built. Most functions gain nothing, so a second table counts the trials of those alone that gain more than
:data:`GAIN` in the run that knows nothing. Results: ``DIR/results.json`` and ``DIR/table.md``.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from tests.performance.left_out import LeftOut
from tests.performance.results import Results, write_whole

if TYPE_CHECKING:
    from cost_model.pretrained import Pretrained
    from mlc.graph.task import Task
    from mlc.log import Record
    from mlc.measure.measurer import Measurer, MeasureRequest, MeasureResult
    from mlc.target import Target

__all__ = ["function_curves", "functions_markdown", "latencies", "main", "markdown", "needed"]

ROOT = Path(__file__).parent.parent.parent
KNOWLEDGE = ("nothing", "model", "others")
#: trials whose latencies are in the table
SHOWN = (0, 16, 32, 64, 128, 256)
#: latencies within this part of each other are the same result
SAME = 0.01
#: a function gains where tuning makes it this much faster than its untuned schedule
GAIN = 0.05


class _Remembered:
    """A measurer that times each distinct candidate once."""

    def __init__(self, inner: Measurer) -> None:
        self._inner = inner
        self._known: dict[tuple[str, str], MeasureResult] = {}

    def measure(
        self, requests: Sequence[MeasureRequest], on_result: Callable[[int, MeasureResult], None] | None = None
    ) -> list[MeasureResult]:
        new = {(r.task_key, r.trace): r for r in requests if (r.task_key, r.trace) not in self._known}
        # a limit on a slow candidate's time depends on the run, the time that is remembered must not
        results = self._inner.measure([replace(r, best=0.0) for r in new.values()]) if new else []
        self._known.update(zip(new, results, strict=True))
        found = [self._known[r.task_key, r.trace] for r in requests]
        for i, result in enumerate(found):
            if on_result is not None:
                on_result(i, result)
        return found

    def compare(self, requests: Sequence[MeasureRequest], rounds: int) -> list[MeasureResult]:
        return self.measure(requests)

    def close(self) -> None:
        self._inner.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Tune what is missing, write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="densenet121,inception_v2,resnet50", help="comma-separated")
    parser.add_argument("--trials", type=int, default=256, help="of each run (default: 256)")
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated (default: 0,1,2)")
    parser.add_argument("--target", default="native", help="a CPU target that this machine can run")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "bench-transfer")
    parser.add_argument("--again", action="store_true", help="tune anew what has results already")
    args = parser.parse_args(argv)
    seeds = [int(seed) for seed in args.seeds.split(",")]
    results = Results(args.output)
    one = partial(_tuned, trials=args.trials, seeds=seeds, target_name=args.target)
    for _ in results.fill(args.models.split(","), one, args.again):
        write_whole(args.output / "table.md", _tables(list(results.rows.values())))
    print(_tables([row for row in results.rows.values() if row["model"] in args.models.split(",")]))
    return 0


def _tables(rows: Sequence[Mapping[str, Any]]) -> str:
    return f"{markdown(rows)}\n{functions_markdown(rows)}"


def _tuned(model: str, trials: int, seeds: Sequence[int], target_name: str = "native") -> dict[str, Any]:
    """Every run of a model: the latencies after 0, 1, 2 ... trials."""
    from cost_model.gbt import RankingModel
    from mlc.log import Layers, TuningLog
    from mlc.measure import local_measurer
    from mlc.tuning import TuneOptions, tune_tasks
    from mlc.tuning.session import EXPLORE
    from mlc.tuning.transfer import Experience

    left = LeftOut(model, target_name)
    target, others, tasks = left.target, left.others, left.compilation.tasks(Layers([]))
    taught = _taught(target, left.own)
    runs: dict[str, list[list[float]]] = {kind: [] for kind in KNOWLEDGE}
    functions: dict[str, list[dict[str, list[float]]]] = {kind: [] for kind in KNOWLEDGE}
    measurer = _Remembered(local_measurer(target))
    try:
        untuned = _untuned(tasks, measurer)
        for seed in seeds:
            for kind in KNOWLEDGE:
                began = time.monotonic()
                cost_model = RankingModel(seed=seed, pretrained=None if kind == "nothing" else taught,
                                          explore=EXPLORE)
                with tempfile.TemporaryDirectory() as folder, TuningLog(Path(folder) / "log.db") as log:
                    tune_tasks(
                        tasks, target, log, TuneOptions(trials=trials, seed=seed, confirm_rounds=0), measurer,
                        model=cost_model, shipped=others.best if kind == "others" else None,
                        experience=Experience.of(others.readers, target) if kind == "others" else None,
                    )
                    records = sorted(log.records(), key=lambda record: record.trial)
                runs[kind].append(latencies(tasks, untuned, records))
                functions[kind].append(function_curves(untuned, records))
                print(f"{model}, seed {seed}, {kind}: {runs[kind][-1][0] * 1e3:.4g} ms, after {len(records)} trials "
                      f"{runs[kind][-1][-1] * 1e3:.4g} ms; {time.monotonic() - began:.0f} s", file=sys.stderr)
    finally:
        measurer.close()
    return {"model": model, "tasks": len(tasks), "seeds": list(seeds), "runs": runs, "functions": functions}


def _taught(target: Target, own: set[str]) -> Pretrained:
    """A cost model of the shipped samples without those of the tasks ``own``."""
    from cost_model.pretrained import Pretrained
    from mlc.log import TuningLog
    from mlc.log.shipped import family
    from mlc.tuning.learn import samples_of

    with TuningLog(ROOT / "tuning_logs" / "samples" / f"{family(target)}.db", readonly=True) as log:
        return Pretrained.train([s for s in samples_of(log, target.kind) if s.group not in own])


def _untuned(tasks: Sequence[Task], measurer: _Remembered) -> dict[str, float]:
    """The seconds of each task's untuned schedule."""
    from cost_model.model import RooflineModel
    from mlc.tuning.search import Search

    searches = [Search(task, index, RooflineModel(), "random", 0, [], None) for index, task in enumerate(tasks)]
    defaults = [search.space.default for search in searches]
    # as a run asks for them, so that a measurer that times candidates beside their default knows the default's time
    paired = tasks[0].target.kind == "llvm"
    results = measurer.measure([
        s.request(d.trace, paired) for s, d in zip(searches, defaults, strict=True) if d is not None])
    return {task.key: median(r.times) if r.times else math.inf for task, r in zip(tasks, results, strict=True)}


def latencies(tasks: Sequence[Task], untuned: Mapping[str, float], records: Sequence[Record]) -> list[float]:
    """What the model takes after 0, 1, 2 ... of ``records``, in seconds.

    Of tasks that share a choice the first, which the graph's estimate took, counts until two of them were timed.
    """
    rivals: dict[str, list[str]] = {}
    weights = {task.key: task.weight for task in tasks}
    for task in tasks:
        rivals.setdefault(task.choice or task.key, []).append(task.key)
    best, timed = dict(untuned), set()

    def latency() -> float:
        total = 0.0
        for keys in rivals.values():
            known = [key for key in keys if key in timed]
            total += min(weights[key] * best[key] for key in (known if len(known) > 1 else keys[:1]))
        return total

    found = [latency()]
    for record in records:
        timed.add(record.task_key)
        best[record.task_key] = min(best[record.task_key], record.seconds)
        found.append(latency())
    return found


def function_curves(untuned: Mapping[str, float], records: Sequence[Record]) -> dict[str, list[float]]:
    """The seconds of each task's best schedule after 0, 1, 2 ... trials of its own, ``untuned`` being the first."""
    curves = {key: [seconds] for key, seconds in untuned.items()}
    for record in records:
        curve = curves[record.task_key]
        curve.append(min(curve[-1], record.seconds))
    return curves


def needed(curve: Sequence[float], result: float) -> int | None:
    """The trials after which ``curve`` stays within :data:`SAME` of ``result`` or below; None where it never does."""
    late = [n for n, seconds in enumerate(curve) if seconds > result * (1 + SAME)]
    after = late[-1] + 1 if late else 0
    return after if after < len(curve) else None


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line a model and kind of knowledge. The result to be reached is what ``nothing`` ends with, seed by seed."""
    lines = [f"| model | knows | {' | '.join(f'{n} trials' for n in SHOWN)} | trials to the same result | part |",
             "|---" * (len(SHOWN) + 4) + "|"]
    for row in rows:
        ends = [curve[-1] for curve in row["runs"]["nothing"]]
        base: float | None = None
        for kind, curves in row["runs"].items():
            at = [median(curve[min(n, len(curve) - 1)] / end for curve, end in zip(curves, ends, strict=True))
                  for n in SHOWN]
            counts = [needed(curve, end) for curve, end in zip(curves, ends, strict=True)]
            middle = median(math.inf if n is None else n for n in counts)
            base = middle if base is None else base
            part = f"{middle / base:.2f}" if base and math.isfinite(middle) else "-"
            cells = [row["model"], kind, *(f"{x:.3f}" for x in at),
                     f"{middle:g} ({', '.join('-' if n is None else str(n) for n in counts)})", part]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def functions_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line a kind of knowledge, over the functions of all models and seeds that gain when nothing is known.

    Trials are a function's own until it stays within :data:`SAME` of where the run that knows nothing ends. Where that
    is never reached, all of its trials count, which is too few: the last column says how often.
    """
    trials: dict[str, list[int]] = {}
    missed: dict[str, int] = {}
    for row in rows:
        for number, alone in enumerate(row["functions"]["nothing"]):
            gaining = {key: curve[-1] for key, curve in alone.items() if curve[0] > curve[-1] * (1 + GAIN)}
            for kind, runs in row["functions"].items():
                for key, end in gaining.items():
                    found = needed(runs[number][key], end)
                    trials.setdefault(kind, []).append(len(runs[number][key]) - 1 if found is None else found)
                    missed[kind] = missed.get(kind, 0) + (found is None)
    if not trials:
        return f"No function gains more than {GAIN:.0%}.\n"
    base = sum(trials["nothing"])
    lines = ["| knows | functions that gain | trials to the same result | part | median | not reached |",
             "|---" * 6 + "|"]
    for kind, counts in trials.items():
        cells = [kind, len(counts), sum(counts), f"{sum(counts) / base:.2f}", f"{median(counts):g}", missed[kind]]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
