"""``make shipped-logs``: tune the benchmark models for each x86 level and write the logs that ship with mlc.

``python -m tuning_logs.ship --seconds 60`` gives each model 60 s on each target. What is measured goes to working logs,
and after every model the best record of each task to ``tuning_logs/<level>/models.jsonl``, so that an interrupted run
loses nothing; the same command goes on with what is missing, and with more seconds it tunes further. Records of other
models stay in the file: delete it and the working logs to start anew. A target that this machine cannot run is only
cross-built: its records have decisions, no times, and the mark ``untimed``, and are never preferred to anything.

``--quantised`` does the same for the quantised benchmark models, which onnxruntime's quantiser makes (in the folder of
the working logs, some minutes once), for each level with and without dot products of bytes: to ``quantised.jsonl``, and
to ``quantised-vnni.jsonl``, which only machines with such instructions read.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlc.cli import options
from mlc.cli.main import finish
from mlc.cli.outcome import Outcome
from mlc.errors import UsageError
from tuning_logs import quantised
from tuning_logs.samples import WORK

if TYPE_CHECKING:
    from rich.console import Console

    from mlc.graph.task import Task
    from mlc.log import LogReader, Record
    from mlc.measure import Measurer
    from mlc.target import Target

__all__ = ["FILE", "best_records", "in_turn", "main", "refresh", "refreshed", "ship", "write"]

#: what a level's folder holds
FILE = "models.jsonl"
_TARGETS = "x86-64-v4,x86-64-v3"
_WITH_DOTS = {"x86-64-v4": "x86-64-v4 -mattr=+avx512vnni", "x86-64-v3": "x86-64-v3 -mattr=+avxvnni"}
_QUANTISED_TARGETS = ",".join(target for level, dots in _WITH_DOTS.items() for target in (dots, level))
#: where an untimed record's ``extra`` says so
UNTIMED = "untimed"
#: rounds in which alternatives are timed in turn
_ROUNDS = 7
#: of the time of what ships, what a seed must take at most to replace it
_GAIN = 0.97
_ROOT = Path(__file__).resolve().parents[1]


def main(argv: Sequence[str] | None = None) -> int:
    """Parse and run; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tuning_logs.ship", description=__doc__.splitlines()[0])
    parser.add_argument("--targets", help=f"comma-separated (default: {_TARGETS}; of quantised models "
                                          f"{_QUANTISED_TARGETS})")
    parser.add_argument("--models", help="comma-separated names (default: the benchmark models)")
    parser.add_argument("--quantised", action="store_true", help="the quantised benchmark models instead")
    parser.add_argument("--seconds", type=options.positive_float, default=60.0,
                        help="tuning budget of each model on each target (default: 60)")
    parser.add_argument("--work", type=Path, default=WORK, help="where the working logs are")
    parser.add_argument("--output", type=Path, default=_ROOT / "tuning_logs", help="the folder to write")
    parser.add_argument("--refresh", action="store_true",
                        help="tune nothing; time what ships in turn with what the spaces begin with by now, and keep "
                             "the faster")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    args = parser.parse_args(argv)
    from mlc.target import split

    targets = split(args.targets or (_QUANTISED_TARGETS if args.quantised else _TARGETS))
    models = _names(args.models) or (list(quantised.MODELS) if args.quantised else [])
    return finish(
        lambda: refresh(targets, models, args.output) if args.refresh
        else ship(targets, models, args.seconds, args.work, args.output),
        as_json=args.json,
    )


def ship(targets: Sequence[str], models: Sequence[str], seconds: float, work: Path, output: Path) -> Outcome:
    """Tune what is not tuned yet and write the logs; told on standard error."""
    from mlc.installation import check_pins

    check_pins()
    from mlc.measure import load_warning
    from mlc.report.console import stderr_console
    from mlc.target import resolve

    models = _known(models)
    console = stderr_console()
    if busy := load_warning():
        console.print(busy, soft_wrap=True)
    resolved = {name: resolve(name) for name in targets}
    counts: dict[str, int] = {}
    started = time.monotonic()
    work.mkdir(parents=True, exist_ok=True)
    for number, model in enumerate(models):
        for name, target in resolved.items():
            console.print(f"{(time.monotonic() - started) / 60:5.1f} min  {model} ({number + 1} of {len(models)}) for "
                          f"{target.canonical}", soft_wrap=True)
            file = _file(model, target)
            counts[str(file)] = _one(model, target, seconds, work, _slug(name), output / file, console)
    document = {"records": counts, "seconds": time.monotonic() - started, "output": str(output)}
    return Outcome(document, lambda out: _render(document, out))


def refresh(targets: Sequence[str], models: Sequence[str], output: Path) -> Outcome:
    """Replace the records that the first seed of their space beats by now; told on standard error."""
    from mlc.log.shipped import family
    from mlc.measure import local_measurer
    from mlc.report.console import stderr_console
    from mlc.target import resolve
    from tuning_logs.samples import tasks_of

    if any(name in quantised.MODELS for name in models):
        raise UsageError("--refresh is for float32 models alone; leave quantised ones out")
    console, counts = stderr_console(), dict[str, int]()
    began = time.monotonic()
    for name in targets:
        target = resolve(name)
        file = output / family(target) / FILE
        done, measurer = set[str](), local_measurer(target)
        try:
            for model in _known(models):
                tasks = [task for task in tasks_of(model, target) if task.key not in done]
                done.update(task.key for task in tasks)
                kept, replaced = refreshed(tasks, read(file), measurer)
                changed = {new.task_key for _, new in replaced}
                choices = {task.choice for task in tasks if task.choice and task.key in changed}
                rivals = [task for task in tasks if task.choice in choices]
                counts[f"{file.parent.name}/{file.name}"] = write(file, in_turn(rivals, kept, measurer))
                for old, new in replaced:
                    console.print(f"{model}: {new.task_name} {new.seconds * 1e6:.0f} us in place of "
                                  f"{old.seconds * 1e6:.0f}", soft_wrap=True, markup=False)
        finally:
            measurer.close()
    document = {"records": counts, "seconds": time.monotonic() - began, "output": str(output)}
    return Outcome(document, lambda out: _render(document, out))


def refreshed(
    tasks: Sequence[Task], records: Sequence[Record], measurer: Measurer
) -> tuple[list[Record], list[tuple[Record, Record]]]:
    """``records`` with what the first seeds of ``tasks`` beat replaced by these, and each such pair.

    A record is of the spaces of its day, and was never timed beside what they learned since. Both have the times of
    one comparison.
    """
    from mlc.measure import MeasureRequest, machine_id
    from mlc.tuning.candidate import TaskSpace

    known, replaced = {record.task_key: record for record in records}, []
    for task in tasks:
        record = known.get(task.key)
        if record is None or not record.ok:
            continue
        space = TaskSpace(task)
        seed = next((c for c in map(space.realise, space.seeds()) if c is not None), None)
        if seed is None or seed.trace == record.trace:
            continue
        old, new = measurer.compare([MeasureRequest.of(task, trace) for trace in (record.trace, seed.trace)], _ROUNDS)
        if new.failure or not new.times or not (old.failure or _is_faster(new.times, old.times)):
            continue
        timed = replace(record, times=old.times or record.times)
        known[task.key] = _slim(replace(
            record, space=space.space.name, decisions=dict(seed.decisions), trace=seed.trace, times=new.times,
            machine=machine_id(), when=time.time()))
        replaced.append((timed, known[task.key]))
    return list(known.values()), replaced


def _is_faster(new: Sequence[float], old: Sequence[float]) -> bool:
    """By what a comparison in turn can tell, in most rounds."""
    return sum(a < _GAIN * b for a, b in zip(new, old, strict=True)) > len(new) * 3 / 4


def _known(models: Sequence[str]) -> list[str]:
    from mlc.networks.models import BENCHMARK_MODELS, MODELS

    models, known = list(models or BENCHMARK_MODELS), (*MODELS, *quantised.MODELS)
    unknown = [name for name in models if name not in known]
    if unknown:
        raise UsageError(f"a model must be one of {', '.join(known)}, got {', '.join(unknown)}")
    return models


def _file(model: str, target: Target) -> Path:
    """Where the records of a model belong, in the folder of all that ships."""
    from mlc.log.shipped import VNNI, family
    from schedules.machine import cpu_machine

    if model not in quantised.MODELS:
        return Path(family(target), FILE)
    return Path(family(target), f"quantised{VNNI if cpu_machine(target.tvm).dot_per_cycle else ''}.jsonl")


def _slug(target: str) -> str:
    """``x86-64-v4-mattr-avx512vnni`` for a target's name: what its working files are called."""
    return re.sub(r"[^a-z0-9]+", "-", target)


def _model(name: str, work: Path) -> Any:
    """What :func:`mlc.tune` takes for a model's name."""
    return quantised.model_or_file(name, work / "models")


def _one(model: str, target: Target, seconds: float, work: Path, slug: str, file: Path, console: Console) -> int:
    """One model on one target; how many records the target's file has now."""
    from mlc import api
    from mlc.artifact.cpu_features import missing_features, required_features
    from mlc.log import TuningLog
    from mlc.measure import local_measurer
    from mlc.report.progress import listening
    from tuning_logs.samples import every_task

    log, done = work / f"{slug}.db", work / f"{slug}-{model}.json"
    if missing := missing_features("x86_64", required_features(target.tvm)):
        console.print(f"  untimed: this machine lacks {', '.join(missing[:4])}", soft_wrap=True)
        return write(file, [*read(file), *_untimed(_model(model, work), target)])
    spent = json.loads(done.read_text())["seconds"] if done.exists() else 0.0
    if spent < seconds:
        with listening(console) as listener:
            report = api.tune(_model(model, work), target=target, seconds=seconds - spent, log=log, on_event=listener)
        if report.reason == "interrupted":
            raise KeyboardInterrupt("interrupted; the same command goes on")
        done.write_text(json.dumps({"seconds": seconds, "tasks": [task.key for task in report.tasks]}))
    with TuningLog(log, readonly=True) as records:
        write(file, [*read(file), *best_records(records, json.loads(done.read_text())["tasks"])])
    if spent >= seconds:
        return len(read(file))
    measurer = local_measurer(target)
    try:
        return write(file, in_turn(every_task(_model(model, work), target), read(file), measurer))
    finally:
        measurer.close()


def in_turn(tasks: Sequence[Task], records: Sequence[Record], measurer: Measurer) -> list[Record]:
    """``records``, those of alternatives of ``tasks`` timed anew, in turn with each other.

    A run times what it gets to, in its own hour; which alternative is built must not depend on the hour.
    """
    from mlc.measure import MeasureRequest, machine_id

    known = {record.task_key: record for record in records}
    choices: dict[str, dict[str, Task]] = {}
    for task in tasks:
        if task.choice and task.key in known and known[task.key].ok:
            choices.setdefault(task.choice, {})[task.key] = task
    for rivals in (rivals for rivals in choices.values() if len(rivals) > 1):
        requests = [MeasureRequest.of(task, known[key].trace) for key, task in rivals.items()]
        results = measurer.compare(requests, _ROUNDS)
        if all(result.times and not result.failure for result in results):
            for key, result in zip(rivals, results, strict=True):
                timed = replace(known[key], times=result.times, machine=machine_id())
                known[key] = replace(timed, times=(_rounded(timed.seconds),))
    return list(known.values())


def best_records(log: LogReader, keys: Iterable[str]) -> list[Record]:
    """The record that each task is compiled from, without what only its run was concerned with."""
    return [_slim(record) for key in dict.fromkeys(keys) if (record := log.best(key)) is not None]


def _slim(record: Record) -> Record:
    return replace(record, times=(_rounded(record.seconds),), detail="", session="", trial=0, seed=0,
                   build_seconds=0.0, code="", slowness=0.0, made_for="", extra={}, when=float(int(record.when)))


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.4g}")


def _untimed(model: Any, target: Target) -> list[Record]:
    """Schedules that were built for a machine that is not there, without a time."""
    from mlc import api
    from mlc.log import Record
    from mlc.measure import machine_id

    exe = api.compile(model, target=target, log=False, values={})
    return [
        Record(f["key"], f["name"], f["space"], f["decisions"], "[]", flops=f["flops"],
               extra={UNTIMED: f"cross-built on {machine_id()}"})
        for f in exe.metadata["functions"]
    ]


def read(file: Path) -> list[Record]:
    """The records of a shipped file; none where there is no file yet."""
    from mlc.log import Record
    from mlc.log.exchange import read_jsonl

    return [found for _, found in read_jsonl(file) if isinstance(found, Record)] if file.exists() else []


def write(file: Path, records: Iterable[Record]) -> int:
    """Replace ``file`` by the records in the order of their names, one line a task, and note its checksum; how many.

    Of two records of a task the timed one stays, else the later one.
    """
    from mlc.log import manifest
    from mlc.log.codec import canonical_text, digest

    chosen: dict[str, Record] = {}
    for record in records:
        if record.ok or not (record.task_key in chosen and chosen[record.task_key].ok):
            chosen[record.task_key] = record
    texts = [canonical_text(r) for r in sorted(chosen.values(), key=lambda r: (r.task_name, r.task_key))]
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text("".join(f'{{"uid":"{digest(t).hex()}",{t[1:]}\n' for t in texts), encoding="utf-8")
    part.replace(file)
    manifest.note(file)
    return len(texts)


def _names(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def _render(document: Mapping[str, Any], console: Console) -> None:
    for file, count in document["records"].items():
        console.print(f"{Path(document['output']) / file}: {count} records", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
