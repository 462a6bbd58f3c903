"""The common table style of all commands."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from mlc.frontend.origins import listed
from mlc.report import format as fmt
from mlc.text import visible

if TYPE_CHECKING:
    from mlc.tuning.report import TaskReport, TuneReport

__all__ = ["bench_table", "fitted", "functions_table", "table", "tuning_table"]

_LEAST_NAME = 12  # characters that a shortened name keeps


def table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, right: Sequence[str] = (), title: str | None = None,
    bold: Sequence[int] = (),
) -> Table:
    """A table of the given columns; those named in ``right`` are aligned to the right, rows in ``bold`` stand out."""
    out = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", show_edge=False, pad_edge=False)
    for column in columns:
        out.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for number, row in enumerate(rows):
        cells = (cell if isinstance(cell, Text) else Text(_cell(cell)) for cell in row)  # never markup
        out.add_row(*cells, style="bold" if number in bold else None)
    return out


def _cell(value: object) -> str:
    """On one line: a name of a model may have an end of line in it, which would look like another row."""
    return visible(str(value)).replace("\n", "\\n")


def fitted(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, right: Sequence[str] = (), spare: Sequence[str] = ()
) -> RenderableType:
    """A :func:`table` of one line a row however narrow the console is.

    Columns in ``spare`` are left out until it fits, the first ones first; then names in the first column lose their
    middle.
    """
    return _Fitted(tuple(columns), [tuple(row) for row in rows], right, spare)


@dataclass(frozen=True)
class _Fitted:
    columns: tuple[str, ...]
    rows: list[tuple[object, ...]]
    right: Sequence[str]
    spare: Sequence[str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        left, unlimited = list(self.columns), options.update(max_width=10_000)

        def excess(shown: Table) -> int:
            return Measurement.get(console, unlimited, shown).maximum - options.max_width

        for name in self.spare:
            if excess(self._table(left)) <= 0:
                break
            left.remove(name)
        names = max((len(_plain(row[0])) for row in self.rows), default=0)
        yield self._table(left, max(_LEAST_NAME, names - max(0, excess(self._table(left)))))

    def _table(self, columns: Sequence[str], longest: int = 10_000) -> Table:
        places = [self.columns.index(name) for name in columns]
        rows = ((_shortened(row[0], longest), *(row[place] for place in places[1:])) for row in self.rows)
        return table(columns, rows, right=self.right)


def _plain(cell: object) -> str:
    return cell.plain if isinstance(cell, Text) else str(cell)


def _shortened(cell: object, longest: int) -> object:
    """The cell without its middle where it is longer than that: the number at the end tells names apart."""
    text = _plain(cell)
    if len(text) <= longest:
        return cell
    end = (longest - 1) // 2
    short = f"{text[: longest - 1 - end]}…{text[len(text) - end :]}"
    return Text(short, style=cell.style) if isinstance(cell, Text) else short


def tuning_table(report: TuneReport, limit: int = 24) -> RenderableType:
    """What a tuning run found for its costliest tasks, at most ``limit`` of them; the last row sums up the rest.

    Below it stands what was wrong with a task that could not be tuned.
    """

    used = {task.key for task in report.used}

    def cost(task: TaskReport) -> float:
        seconds = task.expected_seconds if task.verdict == "untimed" else task.best_seconds
        return task.weight * seconds if task.key in used and math.isfinite(seconds) else 0.0

    total = sum(cost(task) for task in report.tasks) or math.inf
    ranked = sorted(report.tasks, key=lambda task: (-cost(task), task.name))
    rows: list[tuple[object, ...]] = []
    for task in ranked[:limit]:
        measured = math.isfinite(task.best_seconds)
        share, reached = f"{100 * cost(task) / total:.0f}%", f"{100 * task.roofline_fraction:.0f}%"
        relative = (fmt.factor(task.speedup), share, reached) if measured else ("-", "-", "-")
        # what arithmetic gives where nothing was run
        untimed = task.verdict == "untimed"
        best = f"~ {fmt.seconds(task.expected_seconds)}" if untimed else fmt.seconds(task.best_seconds)
        rows.append((task.name, task.weight, task.trials, fmt.seconds(task.default_seconds), best, *relative,
                     _verdict(task, measured, task.key in used), task.stopped.partition(":")[0] or "-"))
    rest = ranked[limit:]
    if rest:
        share = f"{100 * sum(map(cost, rest)) / total:.0f}%"
        rows.append((f"{len(rest)} more", sum(t.weight for t in rest), sum(t.trials for t in rest), "", "", "", share,
                     "", "", ""))
    right = ("calls", "trials", "untuned", "tuned", "gain", "share", "of roofline")
    shown = fitted(("task", *right, "verdict", "stopped"), rows, right=right,
                   spare=("calls", "verdict", "untuned", "trials"))
    return Group(shown, *(Text(f"{task.name}: {task.stopped}") for task in ranked if ":" in task.stopped))


def _verdict(task: TaskReport, measured: bool, used: bool) -> str:
    if task.verdict == "untimed":
        return "untimed"
    return "-" if not measured else task.verdict if used else "not used"


def functions_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """What each function of a model takes: a row of ``mlc bench --tasks --json`` a line, in their order."""
    total = sum(row["calls"] * row["seconds"] for row in rows) or math.inf
    cells = [
        (row["task"], row["calls"], fmt.seconds(row["seconds"]), fmt.seconds(row["calls"] * row["seconds"]),
         f"{100 * row['calls'] * row['seconds'] / total:.1f}%",
         f"{100 * row['roofline_seconds'] / row['seconds']:.0f}%" if row["roofline_seconds"] * row["seconds"] else "-",
         fmt.rate(row["flops"], row["seconds"]), row["source"],
         listed(row["nodes"]), " ".join(f"{name}={value}" for name, value in row["decisions"].items()))
        for row in rows
    ]
    right = ("calls", "a call", "together", "share", "of roofline", "rate")
    made = table(("function", *right, "from", "nodes", "decisions"), cells, right=right)
    made.columns[0].no_wrap = True  # other columns fold before names do
    return made


def bench_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """Engines side by side, the fastest first and in bold; one that failed shows why instead of its times."""
    ranked = sorted(results, key=lambda r: (r.get("median_ms") is None, r.get("median_ms") or 0.0))
    rows = []
    for result in ranked:
        if result.get("median_ms") is None:
            rows.append((result["engine"], "-", "-", "-", "-", "-", str(result.get("error") or "failed")))
            continue
        times = (fmt.seconds(result[key] / 1e3) for key in ("median_ms", "p10_ms", "p90_ms"))
        relative = result["median_ms"] / ranked[0]["median_ms"]
        error = result.get("max_rel_err")
        rows.append((result["engine"], *times, fmt.factor(relative), "-" if error is None else f"{error:.1e}", ""))
    right = ("median", "p10", "p90", "of fastest", "max rel err")
    columns = ("engine", *right, "") if any(row[-1] for row in rows) else ("engine", *right)
    cells = [row[: len(columns)] for row in rows]
    return table(columns, cells, right=right, bold=[0] if rows and rows[0][1] != "-" else [])
