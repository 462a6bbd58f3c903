"""The results of jobs: a table, and an HTML page with it, the tuning curves, and the devices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from mlc.errors import LogError, UsageError
from mlc.jobs.file import Jobs
from mlc.jobs.run import TargetResult
from mlc.log import Record, Session, TuningLog
from mlc.report import format as fmt
from mlc.report import plots
from mlc.report.html import document
from mlc.report.log_page import tuning_clock
from mlc.text import as_html

__all__ = ["COLUMNS", "RIGHT", "rows", "write"]

COLUMNS = ("target", "model", "untuned", "tuned", "gain", "by", "functions", "shared", "trials", "state")
RIGHT = ("untuned", "tuned", "gain", "functions", "shared", "trials")


def rows(results: Iterable[TargetResult]) -> list[tuple[str, ...]]:
    """A row for each model on each target, one for a target that has brought nothing."""
    found: list[tuple[str, ...]] = []
    for result in results:
        name = result.target if result.executor == "local" else f"{result.target} on {result.executor}"
        state = result.state if result.state in ("done", "not begun") else f"{result.state}: {result.reason}"
        if not result.models:
            found.append((name, *["-"] * (len(COLUMNS) - 2), state))
        for model in result.models:
            found.append((
                name, model.model, fmt.seconds(model.untuned), fmt.seconds(model.tuned), fmt.factor(model.gain),
                "whole model" if model.whole else "functions", str(model.functions), str(model.shared),
                str(result.trials), state,
            ))
    return found


def write(jobs: Jobs, results: Sequence[TargetResult]) -> Path:
    """Write the page and return its path; raises :class:`UsageError` where it cannot be written."""
    try:
        jobs.report.write_text(_page(jobs, results), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"the page must be writable, but {jobs.report} is not ({error.strerror}); name another file "
                         "in `report`") from error
    return jobs.report


def _page(jobs: Jobs, results: Sequence[TargetResult]) -> str:
    done = sum(result.state == "done" for result in results)
    facts = [f"{len(jobs.models)} models", f"{done} of {len(results)} targets done",
             f"{sum(result.trials for result in results)} trials"]
    body = [*_table(COLUMNS, rows(results), RIGHT),
            "<p>By <i>whole model</i>: as compiled without and with the log, timed in turn. By <i>functions</i>: the "
            "sums of what its functions take, untuned and tuned. <i>Shared</i> functions are those that another of the "
            "models has too; they were tuned once for all.</p>"]
    for result in results:
        body += _target(result)
    return document(f"Jobs of {jobs.path.name}", facts, body)


def _target(result: TargetResult) -> Iterable[str]:
    if not result.models:
        return
    yield f"<h2>{as_html(result.target)}</h2>"
    facts = [result.canonical, result.executor, result.machine, f"{result.trials} trials",
             fmt.duration(result.seconds), result.reason, result.log]
    yield f'<p class="facts">{as_html(" · ".join(fact for fact in facts if fact))}</p>'
    records, sessions = _records(result)
    if records:
        yield f'<div class="figure">{plots.svg(plots.best_so_far(records))}</div>'
    if len({record.device for record in records} - {""}) > 1:
        yield f'<div class="figure">{plots.svg(plots.by_device(records, clock=tuning_clock(records, sessions)))}</div>'
    if result.devices:
        cells = [(d.device, d.machine, d.state, str(d.results), str(d.failures), f"{d.rate:.2f}")
                 for d in result.devices]
        yield from _table(("device", "machine", "state", "results", "failures", "results/s"), cells,
                          ("results", "failures", "results/s"))


def _records(result: TargetResult) -> tuple[list[Record], list[Session]]:
    """The log's records of the tasks, and its runs; empty if the log is gone."""
    try:
        with TuningLog(Path(result.log), readonly=True) as log:
            return [record for key in result.tasks for record in log.records(key)
                    if not result.machine or record.machine == result.machine], log.sessions()
    except LogError:
        return [], []


def _table(heads: Sequence[str], lines: Iterable[Sequence[str]], right: Sequence[str]) -> Iterable[str]:
    style = [' class="n"' if head in right else "" for head in heads]
    top = "".join(f"<th{kind}>{as_html(head)}</th>" for head, kind in zip(heads, style, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{as_html(cell)}</td>" for cell, kind in zip(line, style, strict=True)) + "</tr>"
        for line in lines
    )
    yield f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
