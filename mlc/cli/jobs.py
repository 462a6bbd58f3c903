"""``mlc tune JOBS.toml`` and ``mlc jobs``: many models tuned for many targets, as a jobs file says."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlc.cli import options
from mlc.cli.outcome import Command, Outcome, run_chosen
from mlc.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from mlc.jobs.file import Jobs
    from mlc.jobs.run import Plan, TargetResult
    from mlc.tuning.events import Listener

__all__ = ["COMMAND", "EPILOG", "tune"]

EPILOG = """a jobs file:
  seconds = 3600                          # for each target, or trials = N
  models = ["resnet.onnx", "bert-base"]   # or a [[models]] for each: model, priority, shape, winograd, substitutions
  targets = ["x86-64-v3", "x86-64-v4"]    # or a [[targets]]: target, executor, trials, seconds, log, missing, patience
"""

#: options that say what a jobs file says itself, and what they are where they are left out
_OTHERS: dict[str, Any] = {
    "target": "native", "trials": None, "seconds": None, "log": None, "shapes": [], "winograd": None,
    "substitutions": None, "seed": 0, "strategy": "evolutionary",
}


def tune(args: argparse.Namespace) -> Outcome:
    """Run a jobs file, or say what would be run."""
    from mlc.jobs import page, run
    from mlc.jobs.file import read
    from mlc.measure.executors import parse
    from mlc.measure.machine import load_warning
    from mlc.report import plots
    from mlc.report.console import stderr_console

    given = next((name for name, default in _OTHERS.items() if getattr(args, name) != default), None)
    if given is not None:
        raise UsageError(f"--{'shape' if given == 'shapes' else given} is for one model, but {args.model} is a jobs "
                         "file; write it there")
    jobs = read(args.model, args.executor)
    if args.dry_run:
        return _planned(jobs, run.plan(jobs, _source))
    _need_executors(jobs)
    plots.require_matplotlib()
    options.check_folder(jobs.report)
    console = stderr_console()

    def tell(text: str) -> None:
        if args.json:
            console.file.write(json.dumps({"event": "Jobs", "text": text}) + "\n")
        else:
            console.print(text, soft_wrap=True)

    busy = load_warning() if any(parse(target.executor) is None for target in jobs.targets) else ""
    if busy:
        tell(busy)
    results = run.run(jobs, _source, resume=args.resume, tell=tell, listening=lambda: _listening(args.json))
    written = page.write(jobs, results)
    states = [result.state for result in results]
    document: dict[str, Any] = {"jobs": str(jobs.path), "page": str(written), "results": str(jobs.results),
                                "warning": busy,
                                "targets": [result.to_json() for result in results]}
    unfinished = "interrupted" in states or "not begun" in states
    if unfinished:
        words = ["mlc", "tune", args.model, *(["--executor", args.executor] if args.executor != "local" else [])]
        document["resume"] = shlex.join([*words, "--resume"])
    return Outcome(document, lambda console: _render(document, results, console),
                   exit_code=1 if unfinished or "failed" in states or "done" not in states else 0)


def _source(name: str) -> Any:
    from mlc.cli.models import find_model

    model = find_model(name)
    if model.is_artifact:
        raise UsageError(f"{name} is compiled already; give the model that it was built from")
    return model.source()


def _need_executors(jobs: Jobs) -> None:
    """Check that executors are installed, rather than wait for them for ever."""
    from importlib.util import find_spec

    from mlc.errors import MeasureError
    from mlc.measure.executors import parse

    for kind, module in (("ray", "ray"), ("rpc", "tornado")):
        addresses = [parse(target.executor) for target in jobs.targets]
        if any(address is not None and address.kind == kind for address in addresses) and find_spec(module) is None:
            raise MeasureError(f"executors of {kind} need a package that is not installed; run `pip install "
                               f"'mlc[{kind}]'`")


@contextmanager
def _listening(as_json: bool) -> Iterator[Listener]:
    from mlc.report.console import stderr_console
    from mlc.report.progress import listening

    shown: AbstractContextManager[Listener] = listening(stderr_console(), as_json=as_json)
    with shown as listener:
        yield listener


def _render(document: dict[str, Any], results: list[TargetResult], console: Console) -> None:
    from mlc.jobs import page
    from mlc.report.tables import fitted

    console.print(fitted(page.COLUMNS, page.rows(results), right=page.RIGHT, spare=("by", "shared", "trials",
                                                                                   "functions")))
    for result in results:
        if result.log:
            console.print(f"{result.target}: {result.reason}; log: {result.log}", soft_wrap=True)
    console.print(f"page: {document['page']}", soft_wrap=True)
    if "resume" in document:
        console.print(f"all that was measured is in the logs; to go on: {document['resume']}", soft_wrap=True)


def _planned(jobs: Jobs, plans: list[Plan]) -> Outcome:
    document = {"jobs": str(jobs.path), "page": str(jobs.report), "targets": [plan.to_json() for plan in plans]}

    def render(console: Console) -> None:
        from mlc.report.tables import table

        cells = [(plan.target.target, plan.target.executor, _budget(plan.to_json()), plan.functions, plan.shared,
                  plan.known, str(plan.log)) for plan in plans]
        numbers = ("functions", "shared", "known")
        console.print(table(("target", "executor", "budget", *numbers, "log"), cells, right=numbers))
        if plans:
            lines = [(name, next(m.priority for m in jobs.models if m.model == name), functions, calls)
                     for name, functions, calls in plans[0].models]
            console.print(table(("model", "priority", "functions", "calls"), lines,
                                right=("priority", "functions", "calls")))
        console.print(f"nothing was measured; `mlc tune {shlex.quote(str(jobs.path))}` does", soft_wrap=True)

    return Outcome(document, render)


def _budget(values: dict[str, Any]) -> str:
    from mlc.report import format as fmt

    parts = [f"{values['trials']} trials"] if values["trials"] is not None else []
    parts += [fmt.duration(values["seconds"])] if values["seconds"] is not None else []
    return " or ".join(parts) or "until nothing gains"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    action = options.actions(parser)
    show = action("show", "show what a jobs file asks for, and how much of it is done", _show)
    show.add_argument("file", type=Path, metavar="FILE.toml")


def _show(args: argparse.Namespace) -> Outcome:
    from dataclasses import replace

    from mlc.jobs.file import read
    from mlc.jobs.run import TargetResult, known_results

    jobs = read(args.file)
    kept = known_results(jobs)
    results = []
    for job in jobs.targets:
        fresh = TargetResult(jobs.identity(job), job.target, job.executor, "not begun",
                             budget=(job.trials, job.seconds))
        known = kept.get(fresh.identity, fresh)
        results.append(replace(known, budget=fresh.budget))
    models = [{"model": model.model, "priority": model.priority} for model in jobs.models]
    document = {
        "jobs": str(jobs.path), "page": str(jobs.report), "models": models,
        "targets": [{**result.to_json(), "missing": job.missing} for result, job in zip(results, jobs.targets,
                                                                                        strict=True)],
    }

    def render(console: Console) -> None:
        from mlc.jobs import page
        from mlc.report.tables import fitted, table

        console.print(table(("model", "priority"), [(m["model"], m["priority"]) for m in models], right=("priority",)))
        cells = [(job.target, job.executor, _budget({"trials": job.trials, "seconds": job.seconds}), job.missing)
                 for job in jobs.targets]
        console.print(table(("target", "executor", "budget", "if missing"), cells))
        console.print(fitted(page.COLUMNS, page.rows(results), right=page.RIGHT,
                             spare=("by", "shared", "trials", "functions")))

    return Outcome(document, render)


COMMAND = Command("jobs", "show the state of a jobs file of `mlc tune`", _add_arguments, run_chosen, epilog=EPILOG)
