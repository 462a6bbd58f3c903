"""``mlc tune``: searches schedules for a model's functions and records measurements in the log."""

from __future__ import annotations

import argparse
import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlc.cli import jobs, options, precision
from mlc.cli.outcome import Command, Outcome
from mlc.errors import MeasureError, UsageError
from mlc.tuning.strategy import strategy_names

if TYPE_CHECKING:
    from rich.console import Console

    from mlc.cli.models import ModelArgument
    from mlc.target import Target
    from mlc.tuning.report import GraphReport, TuneReport

__all__ = ["COMMAND", "refuse_nothing"]

#: candidates that all fail only if something is wrong, though earlier runs have found ones that work
_MANY = 8

_REASONS = {
    "trials": "the trials are used up", "seconds": "the time is used up", "finished": "no function gains any more",
    "interrupted": "interrupted",
}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser, "an ONNX file, a jobs file (JOBS.toml)")
    options.add_target(parser)
    parser.add_argument("--trials", type=options.positive_int, metavar="N", help="measure at most N candidates")
    parser.add_argument("--seconds", type=options.positive_float, metavar="S",
                        help="stop after S seconds (with neither --trials nor --seconds: when no function is expected "
                             "to gain any more)")
    options.add_log(parser)
    options.add_shape(parser, "sizes of an input with free dimensions")
    options.add_value(parser)
    options.add_winograd(parser)
    options.add_substitutions(parser)
    options.add_integers(parser)
    precision.add_precision(parser)
    parser.add_argument("--seed", type=options.non_negative_int, default=0, metavar="K",
                        help="random seed of the search (default: 0)")
    parser.add_argument("--resume", action="store_true",
                        help="continue with the remaining budget of the last run on this model, or with these jobs")
    parser.add_argument("--dry-run", action="store_true", help="with a jobs file: only show what would be tuned")
    parser.add_argument("--executor", default="local", metavar="E",
                        help="where candidates are measured: local (default: this machine), ray, "
                             "ray://HOST:PORT[/CLASS] (a cluster) or rpc://HOST:PORT/KEY (TVM's tracker); `native` "
                             "then means the devices' CPU")
    parser.add_argument("--strategy", choices=strategy_names(), default="evolutionary",
                        help="how candidates are proposed (default: evolutionary, exhaustive in small spaces)")


def _execute(args: argparse.Namespace) -> Outcome:
    if args.model.endswith(".toml"):
        return jobs.tune(args)
    if args.dry_run:
        raise UsageError(f"--dry-run is for jobs files, NAME.toml, but the model is {args.model}; leave it out")
    from mlc import api
    from mlc.cli.models import find_model
    from mlc.measure.executors import parse
    from mlc.measure.machine import load_warning
    from mlc.report.console import stderr_console
    from mlc.report.progress import listening
    from mlc.target import resolve
    from mlc.tuning.devices import devices

    model = find_model(args.model)
    if model.is_artifact:
        raise UsageError(f"{args.model} is compiled already; give the model that it was built from")
    here = parse(args.executor) is None
    target = resolve(args.target)
    if here or args.log:
        _open_log(Path(_log_path(args, target)).expanduser())
    busy = load_warning() if here and target.kind == "llvm" else ""
    if busy and not args.json:
        stderr_console().print(busy, soft_wrap=True)
    with listening(stderr_console(), as_json=args.json) as listener, \
            devices(args.executor, args.target, listener) as reached:
        target = resolve(reached.target)
        log = _log_path(args, target, reached.machine)
        report = api.tune(
            model.source(), target=target, trials=args.trials, seconds=args.seconds, log=log, seed=args.seed,
            resume=args.resume, strategy=args.strategy, on_event=listener, winograd=args.winograd,
            substitutions=args.substitutions, precision=args.precision, integers=args.integers,
            shapes=options.shapes(args), values=options.values(args), measurer=reached.measurer(target.threads),
        )
    if not report.untimed:
        refuse_nothing(report, log)
    document: dict[str, Any] = {
        "model": args.model, "target": target.canonical, "threads": target.threads, "log": str(log),
        "warning": busy, **report.to_json(),
        **_precision(args, model, target, report, here and report.reason != "interrupted"),
    }
    if report.reason == "interrupted":
        document["resume"] = resume_command(args)
    return Outcome(
        document, lambda console: _render(args, report, document, console),
        exit_code=1 if report.reason == "interrupted" else 0,
    )


def _precision(
    args: argparse.Namespace, model: ModelArgument, target: Target, report: TuneReport, compiled: bool
) -> dict[str, Any]:
    """What the precision costs the model as it is tuned now, if it may be ``compiled`` to see: where this machine has
    measured it, or has not the GPU, and nobody waits for the command to end."""
    from mlc import api

    exe = None
    if args.precision != "f32" and compiled and not report.untimed:
        exe = api.compile(model.source(), target=target, log=args.log, shapes=options.shapes(args),
                          values=options.values(args), winograd=args.winograd, substitutions=args.substitutions,
                          integers=args.integers, precision=args.precision)
    return precision.facts(args, model, target, exe, wait=compiled)


def refuse_nothing(report: TuneReport, log: object) -> None:
    """Raise :class:`MeasureError` after a run in which no candidate worked; a few that fail after others that worked
    are none."""
    tried, failed = sum(task.trials for task in report.tasks), sum(report.failures.values())
    unknown = all(math.isinf(task.best_seconds) for task in report.tasks)
    if report.trials and (unknown or _MANY <= tried <= failed):
        reasons = ", ".join(f"{count} {reason}" for reason, count in report.failures.items())
        raise MeasureError(f"some candidate must run, but all {tried or report.trials} failed ({reasons}); "
                           f"`mlc log show --task fused --log {log}` says why")


def _open_log(path: Path) -> None:
    """Find out that the log cannot be written to before the model is prepared, which may take a minute."""
    from mlc.log import TuningLog

    if path.exists():
        TuningLog(path).close()


def resume_command(args: argparse.Namespace) -> str:
    """The command line that goes on where this run stopped."""
    words = ["mlc", "tune", args.model]
    given = {"--target": args.target if args.target != "native" else None, "--trials": args.trials,
             "--seconds": args.seconds, "--log": args.log, "--seed": args.seed or None,
             "--executor": args.executor if args.executor != "local" else None,
             "--strategy": args.strategy if args.strategy != "evolutionary" else None}
    for name, value in given.items():
        if value is not None:
            words += [name, f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join([*words, *_switches(args), "--resume"])


def _switches(args: argparse.Namespace) -> list[str]:
    return [*options.shape_words(args), *["--no-winograd"] * (args.winograd is False), *_substitutions(args),
            *["--no-integers"] * (args.integers is False), *precision.words(args)]


def _substitutions(args: argparse.Namespace) -> list[str]:
    return [] if args.substitutions is None else ["--substitutions" if args.substitutions else "--no-substitutions"]


def _log_path(args: argparse.Namespace, target: Any, machine: str = "") -> Any:
    from mlc.config import user_log_path

    return args.log or user_log_path(target.canonical, machine)


def _render(args: argparse.Namespace, report: TuneReport, document: dict[str, Any], console: Console) -> None:
    from mlc.report import format as fmt
    from mlc.report.tables import tuning_table

    console.print(tuning_table(report))
    if report.untimed:
        expected = f"; by arithmetic they take {fmt.seconds(report.best_latency)}" if report.best_latency else ""
        console.print(f"{_REASONS.get(report.reason, report.reason)}: {report.trials} candidates compiled in "
                      f"{fmt.duration(report.seconds)}, all of them untimed: this machine has no GPU{expected}",
                      soft_wrap=True)
        _render_end(args, report, document, console)
        return
    together = f"functions together {fmt.seconds(report.best_latency)}"
    if report.default_latency and report.best_latency:  # not every function was measured untuned in a short run
        gain = report.default_latency / report.best_latency
        together += f", untuned {fmt.seconds(report.default_latency)} ({fmt.factor(gain)})"
    console.print(
        f"{_REASONS.get(report.reason, report.reason)}: {report.trials} trials in {fmt.duration(report.seconds)}; "
        f"{together}", soft_wrap=True,
    )
    if report.graph is not None and report.graph.others:
        console.print(_graphs(report.graph), soft_wrap=True)
    _render_end(args, report, document, console)


def _render_end(args: argparse.Namespace, report: TuneReport, document: dict[str, Any], console: Console) -> None:
    """Print what failed, where the records are, and what to do next."""
    if report.failures:
        failed = ", ".join(f"{count} {reason}" for reason, count in report.failures.items())
        console.print(f"candidates that failed: {failed}", soft_wrap=True)
    if "max_rel_err" in document:
        console.print(precision.line(document), soft_wrap=True)
    console.print(f"log: {document['log']}", soft_wrap=True)
    if report.reason == "interrupted":
        console.print(f"all that was measured is there; to go on: {document['resume']}", soft_wrap=True)
    else:
        words = ["mlc", "compile", args.model]
        words += ["--target", args.target] if args.target != "native" else []
        words += ["--log", document["log"]] if args.log or args.executor != "local" else []
        words += _switches(args)
        console.print(f"next: {shlex.join(words)}", soft_wrap=True)


def _graphs(graph: GraphReport) -> str:
    """Which graph is kept, and what says so."""
    from mlc.report import format as fmt

    text = f"graphs: {graph.others} besides the model's own; "
    text += "one of them is kept" if graph.substituted else "the model's own is kept"
    if graph.seconds is None or graph.own_seconds is None:
        return text
    best = "it" if graph.substituted else "the best other"
    return (f"{text}: as a whole {best} takes {fmt.seconds(graph.seconds)}, the model's own "
            f"{fmt.seconds(graph.own_seconds)} ({fmt.factor(graph.own_seconds / graph.seconds)})")


COMMAND = Command("tune", "search for faster schedules", _add_arguments, _execute,
                  epilog=f"{options.MODELS_EPILOG}\n{jobs.EPILOG}")
