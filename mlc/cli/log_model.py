"""``mlc log train`` and ``mlc log evaluate``: train the cost model on logs, and evaluate it on unseen tasks."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlc.cli import options
from mlc.cli.outcome import Outcome
from mlc.errors import LogError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from cost_model.sample import Sample

__all__ = ["add_arguments", "evaluate", "train"]


_RANKED_BY = {"learned": "learned model", "roofline": "analytic estimate alone", "random": "chance"}


def add_arguments(parser: argparse.ArgumentParser, *, output: bool) -> None:
    """The arguments of both commands; ``output``: add the path of the model to write."""
    parser.add_argument("logs", nargs="*", type=Path, metavar="LOG", help="logs to train on (default: --log)")
    parser.add_argument("--log", metavar="FILE", help="the log (default: your own for the target)")
    if output:
        parser.add_argument("-o", "--output", type=Path, required=True, metavar="MODEL", help="the file to write")
        parser.add_argument("--evaluate", action="store_true", help="also measure how well held-out tasks are ranked")
    parser.add_argument("--repeats", type=options.positive_int, default=3, metavar="N",
                        help="repetitions of the cross-validation (default: 3)")
    parser.add_argument("--by-model", action="store_true",
                        help="hold out one model at a time instead of folds of tasks")
    parser.add_argument("--folds", type=options.positive_int, default=6, metavar="N",
                        help="folds of the cross-validation over tasks (default: 6)")
    parser.add_argument("--fewest", type=options.positive_int, default=8, metavar="N",
                        help="evaluate on tasks with at least N candidates; others are only trained on (default: 8)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed (default: 0)")
    options.add_target(parser, "the target whose log it is")


def train(args: argparse.Namespace, place: Path) -> Outcome:
    """Train on everything the logs hold and write the model."""
    from cost_model.pretrained import Pretrained
    from mlc.log import manifest

    options.check_folder(args.output)
    samples = _samples(args, place)
    document = _counts(samples)
    try:
        blob = Pretrained.train(samples, seed=args.seed).save()
    except ValueError as error:
        raise LogError(f"{error}; give logs with more tasks") from None
    if args.evaluate:
        document["held_out"] = _held_out(samples, args, place)
    try:
        part = args.output.with_name(f".{args.output.name}.part")
        part.write_bytes(blob)
        part.replace(args.output)
        if manifest.ships(args.output):
            manifest.note(args.output.resolve())
    except OSError as error:
        raise LogError(f"the model must be writable, but {args.output} is not ({error.strerror})") from error
    document |= {"model": str(args.output), "bytes": len(blob)}
    return Outcome(document, lambda console: _render(document, console))


def evaluate(args: argparse.Namespace, place: Path) -> Outcome:
    """Grouped cross-validation: no task is ranked by a model that has seen it."""
    samples = _samples(args, place)
    document = {**_counts(samples), "held_out": _held_out(samples, args, place)}
    return Outcome(document, lambda console: _render(document, console))


def _samples(args: argparse.Namespace, place: Path) -> list[Sample]:
    from mlc.log import TuningLog
    from mlc.target import resolve
    from mlc.tuning.learn import samples_of

    kind, found = resolve(args.target).kind, []
    for path in args.logs or [place]:
        with TuningLog(path, readonly=True) as log:
            mine = list(samples_of(log, kind))
            if not mine and log.count():
                raise LogError(f"a log to learn from must say what its tasks compute, but {path} does not for {kind}; "
                               "tune with this mlc, which notes it")
            found += mine
    return found


def _counts(samples: Sequence[Sample]) -> dict[str, Any]:
    return {"tasks": len({s.group for s in samples}), "samples": len(samples)}


def _held_out(samples: Sequence[Sample], args: argparse.Namespace, place: Path) -> dict[str, Any]:
    import numpy as np

    from cost_model.evaluate import cross_validate
    from cost_model.pretrained import Pretrained

    def learner(known: Sequence[Sample], seed: int) -> Any:
        model = Pretrained.train(known, seed=seed)

        def scorer(group: Sequence[Sample]) -> np.ndarray:
            vectors = np.stack([s.features.vector for s in group])
            return model.predict(vectors, np.array([s.features.seconds for s in group]))[0]

        return scorer

    origins = _origins(args, place) if args.by_model else None
    try:
        found = cross_validate(
            samples, learner, folds=args.folds, seed=args.seed, repeats=args.repeats, origins=origins,
            fewest=args.fewest,
        )
    except ValueError as error:
        raise LogError(f"{error}; give logs with more tasks, or ask less of them (--fewest)") from None
    return {kind: ranking.to_json() for kind, ranking in found.items()}


def _origins(args: argparse.Namespace, place: Path) -> dict[str, set[str]]:
    """Which models have a task, in whichever log says so."""
    from mlc.log import TuningLog
    from mlc.tuning.learn import origins_of

    found: dict[str, set[str]] = {}
    for path in args.logs or [place]:
        with TuningLog(path, readonly=True) as log:
            for key, models in origins_of(log).items():
                found.setdefault(key, set()).update(models)
    return found


def _render(document: dict[str, Any], console: Console) -> None:
    from mlc.report.tables import table

    if "held_out" in document:
        def percent(quality: dict[str, Any], name: str) -> str:
            spread = quality["spread"][name]
            return f"{100 * quality[name]:.1f}%" + (f" ± {100 * spread:.1f}" if spread else "")

        names = ("pairs", "top1", "top8", "regret1", "regret8")
        columns = ("held-out tasks ranked by", "pairs in order", "first within 5%", "best of 8 within 5%",
                   "first slower by", "best of 8 slower by")
        rows = [(_RANKED_BY[kind], *(percent(q, name) for name in names)) for kind, q in document["held_out"].items()]
        console.print(table(columns, rows, right=columns[1:]))
        console.print(f"{document['held_out']['learned']['tasks']} tasks, each ranked by a model that has seen none of "
                      "its samples; ± over the ways to deal them into folds", soft_wrap=True)
    told = f"{document['samples']} schedules of {document['tasks']} tasks"
    if "model" in document:
        told = f"{document['model']}: {document['bytes'] / 1024:.0f} KiB, from {told}"
    console.print(told, soft_wrap=True)
