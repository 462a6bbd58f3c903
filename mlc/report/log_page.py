"""The page of ``mlc log show --plot``: progress by trials and by time, failures, and why each run stopped."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlc.errors import UsageError
from mlc.report import format as fmt
from mlc.report import plots
from mlc.report.html import document
from mlc.text import as_html

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from mlc.log.record import Record
    from mlc.log.store import Session

__all__ = ["SUFFIXES", "check_plot", "failures", "page", "tuning_clock", "write"]

SUFFIXES = (".html", ".png", ".svg")
_DETAILS = 5  # kinds of failure that are told in words


def check_plot(path: Path) -> None:
    """Refuse before a log is read what could not be written after it."""
    if path.suffix not in SUFFIXES:
        raise UsageError(f"--plot must name a file that ends in {', '.join(SUFFIXES)}, got {path.name!r}")
    plots.require_matplotlib()


def write(path: Path, log: str, records: Sequence[Record], sessions: Sequence[Session]) -> None:
    """The page, or the two figures alone as a picture."""
    if path.suffix == ".html":
        path.write_text(page(log, records, sessions), encoding="utf-8")
    elif path.suffix == ".png":
        path.write_bytes(plots.png(_figures(records, sessions)))
    else:
        path.write_text(plots.svg(_figures(records, sessions)[0]), encoding="utf-8")


def page(log: str, records: Sequence[Record], sessions: Sequence[Session]) -> str:
    """The whole document."""
    tasks = len({record.task_key for record in records})
    by_trials, by_time = map(plots.svg, _figures(records, sessions))
    facts = [f"{tasks} tasks", f"{len(records)} records", f"{len(sessions)} runs"]
    return document(f"Tuning log {Path(log).name}", facts, [
        "<h2>Best so far, by trials</h2>", f'<div class="figure">{by_trials}</div>',
        "<h2>Best so far, by time</h2>", f'<div class="figure">{by_time}</div>',
        "<h2>Failures</h2>", *_failures(records), "<h2>Runs</h2>", *_sessions(sessions),
    ])


def tuning_clock(records: Iterable[Record], sessions: Sequence[Session]) -> Callable[[Record], float]:
    """Seconds of tuning before a record was made: runs one after the other, what lies between them left out.

    A run that the log does not know begins with its first record.
    """
    first: dict[str, float] = {session.id: session.started for session in sessions}
    last: dict[str, float] = {}
    for record in records:
        first[record.session] = min(first.get(record.session, record.when), record.when)
        last[record.session] = max(last.get(record.session, record.when), record.when)
    before, offset = {}, 0.0
    for name in sorted(last, key=lambda s: (first[s], s)):
        before[name] = offset
        offset += last[name] - first[name]
    return lambda record: before[record.session] + record.when - first[record.session]


def failures(records: Iterable[Record]) -> list[tuple[str, int, str]]:
    """``(reason, how many, the commonest detail)``, the commonest reason first."""
    details: dict[str, Counter[str]] = {}
    for record in records:
        if record.failure:
            details.setdefault(record.failure, Counter())[record.detail] += 1
    ranked = sorted(details.items(), key=lambda item: (-item[1].total(), item[0]))
    return [(reason, found.total(), found.most_common(1)[0][0]) for reason, found in ranked]


def _figures(records: Sequence[Record], sessions: Sequence[Session]) -> list[Figure]:
    return [plots.best_so_far(records), plots.best_so_far(records, clock=tuning_clock(records, sessions))]


def _failures(records: Sequence[Record]) -> Iterable[str]:
    found = failures(records)
    if not found:
        yield "<p>None.</p>"
        return
    rows = [(reason, str(count), detail) for reason, count, detail in found[:_DETAILS]]
    yield _table(("reason", "candidates", "most of them"), rows)


def _sessions(sessions: Sequence[Session]) -> Iterable[str]:
    if not sessions:
        yield "<p>The log notes none.</p>"
        return
    rows = [
        (f"{datetime.datetime.fromtimestamp(s.started):%Y-%m-%d %H:%M}", str(s.trials), fmt.duration(s.seconds),
         str(s.options.get("reason", "not ended")), _stopped(s.options.get("stopped")))
        for s in sessions
    ]
    yield _table(("started", "trials", "spent", "stopped by", "tasks that stopped before"), rows)


def _stopped(tasks: Any) -> str:
    """``12 flat, 3 roofline``, from a run's note of why its tasks stopped."""
    counts = Counter(map(str, tasks.values())) if isinstance(tasks, dict) else Counter[str]()
    return ", ".join(f"{count} {reason}" for reason, count in counts.most_common())


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f"<th>{as_html(head)}</th>" for head in heads)
    lines = "".join("<tr>" + "".join(f"<td>{as_html(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table>"
