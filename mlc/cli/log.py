"""``mlc log``: show, merge, exchange, prune and check tuning logs."""

from __future__ import annotations

import argparse
import heapq
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlc.cli import log_model, options
from mlc.cli.outcome import Command, Outcome, run_chosen
from mlc.errors import LogError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from mlc.log import LogReader, Record

__all__ = ["COMMAND"]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    action = options.actions(parser)
    show = action("show", "show the tasks of a log with their best times", _show)
    _add_place(show)
    show.add_argument("--task", metavar="TEXT", help="show the records of the tasks whose name or key contains TEXT")
    show.add_argument("--sessions", action="store_true", help="show the tuning runs instead of the tasks")
    show.add_argument("--plot", type=Path, metavar="FILE",
                      help="plot the best time so far: .html (with failures and runs), .png or .svg")
    show.add_argument("--limit", type=options.positive_int, default=40, metavar="N",
                      help="show at most N lines (default: 40)")
    merge = action("merge", "add the records of other logs to one", _merge)
    merge.add_argument("sources", nargs="+", type=Path, metavar="FILE", help="a .db or .jsonl log")
    _add_place(merge)
    export = action("export", "write a log as JSON lines, or for MetaSchedule", _export)
    export.add_argument("file", type=Path, metavar="FILE.jsonl")
    export.add_argument("--metaschedule", action="store_true",
                        help="write a folder with MetaSchedule's JSON database, which plain TVM can use")
    _add_place(export)
    imports = action("import", "add the records of a JSON lines file, or of a MetaSchedule database", _import)
    imports.add_argument("file", type=Path, metavar="FILE.jsonl",
                         help="the file, or a folder with MetaSchedule's two files")
    _add_place(imports)
    push = action("push", "share the measurements of this log through a folder", _push)
    push.add_argument("folder", type=Path, metavar="DIR", help="the folder; each log has its own file there")
    _add_place(push)
    pull = action("pull", "add the measurements that others have shared through a folder", _pull)
    pull.add_argument("folder", type=Path, metavar="DIR", help="the folder")
    _add_place(pull)
    prune = action("prune", "copy a log without the records that no longer matter", _prune)
    prune.add_argument("file", type=Path, metavar="NEW", help="the pruned log")
    prune.add_argument("--keep", type=options.positive_int, default=8, metavar="N",
                       help="how many of a task's best records to keep (default: 8)")
    prune.add_argument("--sample", type=int, default=24, metavar="N",
                       help="how many of its other records to keep, chosen at random (default: 24)")
    _add_place(prune)
    train = action("train", "train the cost model on logs", lambda args: log_model.train(args, _place(args)))
    log_model.add_arguments(train, output=True)
    evaluate = action("evaluate", "measure how well the cost model ranks candidates of unseen tasks",
                      lambda args: log_model.evaluate(args, _place(args)))
    log_model.add_arguments(evaluate, output=False)
    check = action("check", "check that a log is intact; exit code 1 if it is not", _check)
    check.add_argument("file", nargs="?", type=Path, metavar="FILE", help="the log (default: --log)")
    check.add_argument("--salvage", type=Path, metavar="NEW", help="copy the readable records into a new log")
    _add_place(check)


def _add_place(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--log", metavar="FILE", help="the log (default: your own for the target)")
    options.add_target(parser, "the target whose log it is")


def _place(args: argparse.Namespace) -> Path:
    """The file that is meant: ``--log``, else the user's own for the target."""
    if args.log:
        return Path(args.log)
    from mlc.config import user_log_path
    from mlc.target import resolve

    return user_log_path(resolve(args.target).canonical)


def _show(args: argparse.Namespace) -> Outcome:
    from mlc.log import TuningLog, layered
    from mlc.target import resolve

    path = _place(args)
    if args.plot:
        return _plot(path, args.plot, args.task)
    if args.sessions:
        with TuningLog(path, readonly=True) as log:
            return _show_sessions(path, log, args.limit)
    with TuningLog(path, readonly=True) if args.log else layered(None, resolve(args.target)) as reader:
        if args.task:
            return _show_records(path, reader, args.task, None if args.json else args.limit)
        return _show_tasks(path, reader, args.limit)


def _show_tasks(path: Path, reader: LogReader, limit: int) -> Outcome:
    tasks: list[dict[str, Any]] = [
        {"task": t.task_name, "key": t.task_key, "records": t.records, "failures": t.failures,
         "best_ms": t.best_seconds * 1e3, "versions": t.versions}
        for t in sorted(reader.tasks(), key=lambda t: (t.task_name, t.task_key))
    ]
    document = {"log": str(path), "records": reader.count(), "tasks": tasks}

    def render(console: Console) -> None:
        from mlc.report import format as fmt
        from mlc.report.tables import table

        columns = ("task", "records", "failures", "best", "versions", "key")
        rows = [(t["task"], t["records"], t["failures"], fmt.seconds(t["best_ms"] / 1e3), t["versions"], t["key"][:8])
                for t in tasks[:limit]]
        if tasks:
            console.print(table(columns, rows, right=("records", "failures", "best")))
        if len(tasks) > limit:
            console.print(f"and {len(tasks) - limit} more; --limit shows them")
        console.print(f"{len(tasks)} tasks, {document['records']} records in {path}", soft_wrap=True)

    return Outcome(document, render)


def _plot(path: Path, file: Path, text: str | None) -> Outcome:
    from mlc.log import TuningLog
    from mlc.report import log_page

    log_page.check_plot(file)
    options.check_folder(file)
    with TuningLog(path, readonly=True) as log:
        keys = _matching(log, text) if text else [None]
        records, sessions = [_slim(r) for key in keys for r in log.records(key)], log.sessions()
    try:
        log_page.write(file, str(path), records, sessions)
    except OSError as error:
        raise LogError(f"the plot must be writable, but {file} is not ({error.strerror})") from error
    return Outcome({"log": str(path), "plot": str(file), "records": len(records)},
                   _line(f"{file}: {len(records)} records"))


def _slim(record: Record) -> Record:
    """A record without what plots do not need: nine tenths of it are its trace."""
    return replace(
        record, trace="", decisions={}, code="", extra={}, task_key=sys.intern(record.task_key),
        task_name=sys.intern(record.task_name), space="", machine="", versions="", session=sys.intern(record.session),
    )


def _matching(reader: LogReader, text: str) -> list[str]:
    """The keys of the tasks that ``--task`` means."""
    keys = [t.task_key for t in reader.tasks() if text in t.task_name or t.task_key.startswith(text)]
    if not keys:
        raise UsageError(f"--task must be part of a task's name or the start of its key, got {text!r}; "
                         "`mlc log show` lists the tasks")
    return keys


def _show_records(path: Path, reader: LogReader, text: str, limit: int | None) -> Outcome:
    """The first ``limit`` by task and time, None for all: those that are not shown need not be held."""
    keys = _matching(reader, text)
    total = sum(summary.records for summary in reader.tasks() if summary.task_key in keys)
    found = (record for key in keys for record in reader.records(key))
    records = heapq.nsmallest(limit or total, found, key=lambda r: (r.task_name, r.task_key, r.seconds))
    rows: list[dict[str, Any]] = [
        {"task": r.task_name, "key": r.task_key, "ms": r.seconds * 1e3, "failure": r.failure, "detail": r.detail,
         "space": r.space, "decisions": dict(r.decisions), "machine": r.machine, "device": r.device,
         "versions": r.versions, "session": r.session, "trial": r.trial}
        for r in records
    ]

    def render(console: Console) -> None:

        from mlc.report import format as fmt
        from mlc.report.tables import table

        cells = [
            (r["task"], fmt.seconds(r["ms"] / 1e3) if not r["failure"] else r["failure"], r["space"],
             r["detail"] if r["failure"] else " ".join(f"{k}={v}" for k, v in r["decisions"].items()))
            for r in rows
        ]
        console.print(table(("task", "time", "space", "decisions"), cells, right=("time",)))
        if total > len(rows):
            console.print(f"and {total - len(rows)} more; --limit shows them")

    return Outcome({"log": str(path), "records": rows}, render)


def _show_sessions(path: Path, log: Any, limit: int) -> Outcome:
    sessions = [{"session": s.id, "started": s.started, "trials": s.trials, "seconds": s.seconds, "options": s.options}
                for s in log.sessions()]

    def render(console: Console) -> None:
        import datetime

        from mlc.report import format as fmt
        from mlc.report.tables import table

        rows = [
            (s["session"], f"{datetime.datetime.fromtimestamp(s['started']):%Y-%m-%d %H:%M}", s["trials"],
             fmt.duration(s["seconds"]), " ".join(f"{k}={v}" for k, v in s["options"].items()))
            for s in sessions[-limit:]
        ]
        console.print(table(("session", "started", "trials", "spent", "options"), rows, right=("trials", "spent")))

    return Outcome({"log": str(path), "sessions": sessions}, render)


def _merge(args: argparse.Namespace) -> Outcome:
    from mlc.log import TuningLog, merge

    path = _place(args)
    missing = next((source for source in args.sources if not source.is_file()), None)
    if missing:  # before the target is created
        raise LogError(f"a log to merge must be a file, but {missing} does not exist; check the path")
    with TuningLog(path) as into:
        return _exchanged(path, merge(into, args.sources))


def _import(args: argparse.Namespace) -> Outcome:
    from mlc.log import TuningLog, import_jsonl

    path = _place(args)
    if args.file.is_dir():
        return _import_database(args, path)
    if not args.file.is_file():
        raise LogError(f"a file to import must exist, but {args.file} does not; `mlc log export` writes one")
    with TuningLog(path) as log:
        return _exchanged(path, import_jsonl(log, args.file))


def _import_database(args: argparse.Namespace, path: Path) -> Outcome:
    from mlc.log import TuningLog
    from mlc.log.metaschedule import import_database
    from mlc.target import resolve

    with TuningLog(path) as log:
        done = import_database(log, args.file, resolve(args.target))
    return Outcome({"log": str(path), **done.to_json()}, _line(f"{path}: {done}"))


def _exchanged(path: Path, done: Any) -> Outcome:
    """Skipped lines make the exit code 1: the caller asked for all of them."""
    document = {
        "log": str(path), "added": done.added, "duplicates": done.duplicates,
        "problems": [{"source": source, "line": line, "reason": reason} for source, line, reason in done.problems],
    }
    return Outcome(document, _line(f"{path}: {done}"), exit_code=1 if done.problems else 0)


def _export(args: argparse.Namespace) -> Outcome:
    from mlc.log import TuningLog, export_jsonl

    path = _place(args)
    if args.metaschedule:
        from mlc.log.metaschedule import export_database

        with TuningLog(path, readonly=True) as log:
            done = export_database(log, args.file)
        return Outcome({"log": str(path), "file": str(args.file), **done.to_json()}, _line(f"{args.file}: {done}"))
    options.check_folder(args.file)
    with TuningLog(path, readonly=True) as log:
        count = export_jsonl(log, args.file)
    return Outcome({"log": str(path), "file": str(args.file), "records": count}, _line(f"{args.file}: {count} records"))


def _push(args: argparse.Namespace) -> Outcome:
    from mlc.log import TuningLog
    from mlc.log.share import push

    path = _existing(args)
    with TuningLog(path) as log:
        file, count = push(log, args.folder)
    return Outcome({"log": str(path), "file": str(file), "records": count}, _line(f"{file}: {count} records"))


def _pull(args: argparse.Namespace) -> Outcome:
    from mlc.log import TuningLog
    from mlc.log.share import pull

    path = _place(args)
    if not args.folder.is_dir():  # before the log is made
        raise LogError(f"logs are shared through a folder, but {args.folder} is none; check the path")
    with TuningLog(path) as log:
        pulled = pull(log, args.folder)
    done = pulled.exchange
    document = {
        "log": str(path), "files": pulled.files, "added": done.added, "duplicates": done.duplicates,
        "problems": [{"source": source, "line": line, "reason": reason} for source, line, reason in done.problems],
        "gains": [asdict(gain) for gain in pulled.gains],
    }

    def render(console: Console) -> None:
        from mlc.report import format as fmt
        from mlc.report.tables import table

        rows = [(gain.task_name, fmt.seconds(gain.seconds), fmt.factor(gain.factor) if gain.factor else "new",
                 gain.machine, gain.versions, "-" if not gain.over else
                 "the same" if gain.over == gain.machine else gain.over) for gain in pulled.gains]
        if rows:
            console.print(table(("task", "best", "gain", "machine", "versions", "over one of"), rows,
                                right=("best", "gain")))
        console.print(f"{path}: {done}, from {pulled.files} files", soft_wrap=True)

    return Outcome(document, render, exit_code=1 if done.problems else 0)


def _existing(args: argparse.Namespace) -> Path:
    path = _place(args)
    if not path.is_file():
        raise LogError(f"a log must exist to be shared, but {path} does not; `mlc tune` writes one")
    return path


def _prune(args: argparse.Namespace) -> Outcome:
    from mlc.log.prune import prune

    path = _place(args)
    options.check_folder(args.file)
    before, after = prune(path, args.file, args.keep, args.sample)
    return Outcome({"log": str(path), "pruned": str(args.file), "before": before, "after": after},
                   _line(f"{args.file}: {after} of {before} records"))


def _check(args: argparse.Namespace) -> Outcome:
    from mlc.log import check, salvage

    path = args.file or _place(args)
    report = check(path)
    document: dict[str, Any] = {
        "log": str(path), "ok": report.ok, "records": report.records, "damaged": report.damaged,
        "problems": list(report.problems), "by_versions": report.by_versions,
    }
    text = str(report)
    if args.salvage:
        saved = salvage(path, args.salvage)
        document["salvaged"] = {"log": str(args.salvage), "records": saved.records}
        text += f"\n{args.salvage}: {saved.records} records saved"
    return Outcome(document, _line(text), exit_code=0 if report.ok else 1)


def _line(text: str) -> Callable[[Console], None]:
    return lambda console: console.print(text, soft_wrap=True)


COMMAND = Command("log", "show, merge, exchange, prune and check tuning logs; train cost models on them",
                  _add_arguments, run_chosen)
