"""``make samples``: time a spread of candidates of many different tasks, which the cost model learns from.

``python -m tuning_logs.samples prepare`` picks tasks of the benchmark models, a few of each search space from the
quickest to the slowest, and notes them in the log with the models that they are of; ``measure`` times candidates of
each: the first seeds, neighbours of seeds and random points. What was disturbed is timed once more by the next call.
Both go on where they were interrupted, so that a machine that is quiet for a minute at a time is enough. Nothing else
may run meanwhile. That the repeats of one candidate agree says little: times that had, taken without such care, put
76% of the pairs of six tasks in the order of times taken alone; two takes alone agreed on 83% of four others.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlc.cli import options
from mlc.cli.main import finish
from mlc.cli.outcome import Outcome
from mlc.errors import UsageError
from tuning_logs import quantised

if TYPE_CHECKING:
    from mlc.graph.task import Task
    from mlc.log import Record, TuningLog
    from mlc.tuning.candidate import Candidate, TaskSpace

__all__ = ["WORK", "main", "spread", "tasks_of"]

#: what is made on the way to what ships
WORK = Path(__file__).resolve().parents[1] / "build" / "shipped"

_BATCH = 64
#: times of one candidate that differ more than this were disturbed
_QUIET = 1.12
#: seeds of a task at least: an untuned build takes the first, a search begins with them
_SEEDS = 8
#: more tasks teach more than more candidates of each; but which candidates are best is asked of every so many tasks,
#: and there they must be so many times as many
_DEEP, _DEEPER = 5, 3
#: draws for one candidate before a source of candidates counts as used up
_PATIENCE = 60


def main(argv: Sequence[str] | None = None) -> int:
    """Parse and run; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tuning_logs.samples", description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("prepare", "measure"))
    parser.add_argument("--log", type=Path, required=True, help="where tasks and times go")
    parser.add_argument("--target", default="native", help="as for mlc tune (default: native)")
    parser.add_argument("--models", help="comma-separated names (default: the benchmark models, and those of "
                                         "few bits, which onnxruntime's quantiser makes)")
    parser.add_argument("--work", type=Path, default=WORK, help="where those are made")
    parser.add_argument("--each", type=options.positive_int, default=4, metavar="N",
                        help="tasks of each search space of a model (default: 4)")
    parser.add_argument("--candidates", type=options.positive_int, default=12, metavar="N",
                        help=f"candidates of each task (default: 12), and {_DEEPER} times as many of every {_DEEP}th")
    parser.add_argument("--seconds", type=options.positive_float, default=60.0,
                        help="measure for so long (default: 60)")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    args = parser.parse_args(argv)
    return finish(lambda: _prepare(args) if args.action == "prepare" else _measure(args), as_json=args.json)


def _prepare(args: argparse.Namespace) -> Outcome:
    from mlc.log import TuningLog, Workload
    from mlc.networks.models import BENCHMARK_MODELS, MODELS
    from mlc.target import resolve
    from mlc.tuning.learn import note_origin

    known = (*MODELS, *quantised.SAMPLED)
    models = [m.strip() for m in args.models.split(",")] if args.models else [*BENCHMARK_MODELS, *quantised.SAMPLED]
    unknown = [name for name in models if name not in known]
    if unknown:
        raise UsageError(f"a model must be one of {', '.join(known)}, got {', '.join(unknown)}")
    target, added = resolve(args.target), 0
    for model in models:
        tasks = every_task(quantised.model_or_file(model, args.work / "models"), target)
        chosen = spread(tasks, args.each)
        with TuningLog(args.log) as log:
            added += log.put_workloads(map(Workload.of, chosen))
            note_origin(log, model, [task.key for task in tasks])
        print(f"{model}: {len(chosen)} tasks", file=sys.stderr)
    return _outcome({"log": str(args.log), "tasks": added})


def tasks_of(model: str, target: Any) -> list[Task]:
    """Every task that a benchmark model has, its alternatives among them."""
    from mlc.networks.models import model_named

    return every_task(model_named(model), target)


def every_task(model: Any, target: Any) -> list[Task]:
    """The same of anything that :func:`mlc.compile` takes."""
    from mlc.compilation import Compilation

    return Compilation.of(model, target, substitutions=False).tasks()


def spread(tasks: Sequence[Task], each: int) -> list[Task]:
    """At most ``each`` tasks of each search space, evenly from the one with the least work to the one with the most."""
    from cost_model.roofline import estimate
    from schedules.registry import find

    by_space: dict[str, list[Task]] = {}
    for task in tasks:
        by_space.setdefault(find(task.func, task.target.tvm).name, []).append(task)
    chosen = []
    for _, found in sorted(by_space.items()):
        found.sort(key=lambda t: (estimate(t.func, t.target.tvm), t.key))
        last = len(found) - 1
        places = {round(i * last / max(1, each - 1)) for i in range(each)}
        chosen += [found[i] for i in sorted(places)]
    return chosen


def _measure(args: argparse.Namespace) -> Outcome:
    from mlc.log import TuningLog
    from mlc.measure import LocalMeasurer, MeasureOptions

    began, measured, left = time.monotonic(), 0, 0
    with TuningLog(args.log) as log:
        tasks = [workload.task() for workload in log.workloads()]
        random.Random(0).shuffle(tasks)  # an interrupted run has seen some of everything
        threads = tasks[0].target.threads if tasks else 1
        measurer = LocalMeasurer(MeasureOptions(threads=threads, timeout=6.0, cutoff=0.25), threads)
        try:
            for number, task in enumerate(tasks):
                if time.monotonic() - began > args.seconds:
                    left += 1
                    continue
                measured += _sample(task, log, measurer, args.candidates * (_DEEPER if number % _DEEP == 0 else 1))
        finally:
            measurer.close()
    return _outcome({"log": str(args.log), "measured": measured, "tasks_left": left})


def _sample(task: Task, log: TuningLog, measurer: Any, wanted: int) -> int:
    """Measure what one task lacks; how many candidates that were."""
    from mlc.tuning.candidate import Candidate, TaskSpace

    known = [record for key in reversed(task.keys) for record in log.records(key)]
    if known:  # a task is measured in one go, and what was disturbed once more
        doubtful = _doubtful(known)
        for start in range(0, len(doubtful), _BATCH):
            again = doubtful[start : start + _BATCH]
            _record(task, log, measurer, [Candidate(task, r.space, r.decisions, (), None, r.trace) for r in again])
        return len(doubtful)
    space = TaskSpace(task)
    candidates = list(_candidates(space, wanted))
    _record(task, log, measurer, candidates)
    return len(candidates)


def _doubtful(records: Sequence[Record]) -> list[Record]:
    """Of each trace that was measured but once, and whose times differ more than a quiet machine's, the record."""
    times = Counter(record.trace for record in records)
    return [r for r in records if r.ok and times[r.trace] == 1 and max(r.times) > _QUIET * min(r.times)]


def _candidates(space: TaskSpace, wanted: int) -> Iterator[Candidate]:
    """Seeds, neighbours of the first of them, and random points: a third each, but no fewer than :data:`_SEEDS` seeds;
    nothing twice by its schedule."""
    rng = random.Random(space.task.key)
    seeds = list(space.seeds())
    seen: set[int] = set()
    tried: set[Any] = set()  # a small space is drawn from again and again
    count = 0

    def points() -> Iterator[tuple[Any, int]]:
        """Points with the number of candidates that there are to be after them."""
        first = max(wanted // 3, min(_SEEDS, wanted))
        for seed in seeds:
            yield seed, first
        for _ in range(_PATIENCE * wanted):
            yield space.neighbour(rng.choice(seeds[:8]) if seeds else space.sample(rng), rng), (first + wanted) // 2
        for _ in range(_PATIENCE * wanted):
            yield space.sample(rng), wanted

    for point, until in points():
        if count >= until or point in tried:
            continue
        tried.add(point)
        candidate = space.realise(point)
        if candidate is not None and candidate.code not in seen:
            seen.add(candidate.code)
            count += 1
            yield candidate


def _record(task: Task, log: TuningLog, measurer: Any, candidates: Sequence[Candidate]) -> None:
    from cost_model.roofline import analyse
    from mlc.graph.task import versions
    from mlc.log import Record
    from mlc.measure import MeasureRequest, machine_id

    flops = analyse(task.func, task.target.tvm).flops
    request = MeasureRequest.of(task, "")
    results = measurer.measure([replace(request, trace=c.trace) for c in candidates])
    log.append(
        Record(
            task.key, task.name, c.space, dict(c.decisions), c.trace, times=tuple(r.times), failure=r.failure,
            detail=r.detail[:500], machine=machine_id(), versions=versions(), session="samples", trial=i + 1,
            build_seconds=r.build_seconds, when=time.time(), flops=flops,
            code=r.code_hash,
        )
        for i, (c, r) in enumerate(zip(candidates, results, strict=True))
    )


def _outcome(document: dict[str, Any]) -> Outcome:
    text = ", ".join(f"{value} {name}" for name, value in document.items() if name != "log")
    return Outcome(document, lambda console: console.print(f"{document['log']}: {text}", soft_wrap=True))


if __name__ == "__main__":
    sys.exit(main())
