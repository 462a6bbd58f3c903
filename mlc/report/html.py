"""The page of ``mlc compile --report DIR``: every function with its schedule and time, and how tuning went.

One self-contained ``index.html`` with no script and nothing fetched, readable in a light or a dark browser.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlc.errors import UsageError
from mlc.frontend.origins import listed
from mlc.report import format as fmt
from mlc.report import plots
from mlc.text import as_html

if TYPE_CHECKING:
    from mlc.log.record import Record

__all__ = ["CompileReport", "FunctionRow", "check_folder", "document", "page", "scripts", "write"]

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --bar: #0072B2; --mute: #888; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
p.facts { color: var(--mute); margin-top: 0; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; white-space: nowrap; } .n { text-align: right; white-space: nowrap; }
.bar { background: var(--bar); height: .7rem; border-radius: 2px; min-width: 1px; }
td.share { width: 7rem; vertical-align: middle; } code, pre { font: 12px/1.45 ui-monospace, monospace; }
pre { overflow: auto; max-height: 32rem; border: 1px solid var(--line); padding: .8rem; border-radius: 4px; }
.figure { background: #fff; padding: .6rem; border-radius: 4px; overflow: auto; }
.figure svg { max-width: 100%; height: auto; }
summary { cursor: pointer; } .untuned { color: var(--mute); }
"""


@dataclass(frozen=True)
class FunctionRow:
    """One tensor function of the artifact. ``seconds`` is its logged time for one call, None where it has none.

    ``source`` is where its schedule is from: ``log``, ``untimed``, ``shipped``, ``seed`` or ``given``.
    """

    name: str
    calls: int
    space: str
    source: str
    seconds: float | None = None
    flops: float = 0.0
    trials: int = 0
    decisions: dict[str, int] = field(default_factory=dict)
    script: str = ""
    #: the model's nodes that each call comes from
    nodes: Sequence[Sequence[str]] = ()
    #: what a call must read and write at least, and the seconds that the machine's peaks allow for it
    bytes: float = 0.0
    roofline_seconds: float = 0.0


@dataclass(frozen=True)
class CompileReport:
    """What the page shows. ``facts`` stand under the title; ``records`` are the log's, for the curves; ``kernels`` are
    :meth:`mlc.codegen.inspection.Kernel.to_json`'s, with the ``function`` that each belongs to."""

    title: str
    facts: Sequence[str]
    functions: Sequence[FunctionRow]
    records: Sequence[Record] = ()
    kernels: Sequence[Mapping[str, Any]] = ()


def check_folder(folder: Path) -> None:
    """Refuse before the work starts what could not be written after it."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--report must name a folder, but {folder} is a file; give another name")
    plots.require_matplotlib()


def write(folder: Path, report: CompileReport) -> Path:
    """Write ``folder/index.html`` and return its path; the folder is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "index.html"
    path.write_text(page(report), encoding="utf-8")
    return path


def scripts(dump: Path) -> dict[str, str]:
    """The functions of a module that the compiler dumped as text, by symbol; empty where there is no such file."""
    if not dump.is_file():
        return {}
    text = re.sub(r"T\.int64\((-?\d+)\)", r"\1", dump.read_text(encoding="utf-8"))
    found = re.findall(r"^    @T\.prim_func.*?\n    def (\w+)(.*?)(?=^    @|\Z)", text, flags=re.DOTALL | re.MULTILINE)
    return {symbol: textwrap.dedent(f"    def {symbol}{body}").rstrip() + "\n" for symbol, body in found}


def page(report: CompileReport) -> str:
    """The whole document."""
    return document(report.title, report.facts, [
        "<h2>Functions</h2>", *_functions(report.functions), *_kernels(report.kernels), *_tuning(report.records),
        *_scripts(report.functions),
    ])


def document(name: str, facts: Sequence[str], body: Iterable[str]) -> str:
    """A page of our style around ``body``, which is HTML; name and facts are plain text."""
    title = as_html(name)
    parts = [f"<h1>{title}</h1>", f'<p class="facts">{as_html(" · ".join(facts))}</p>', *body]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n<body>\n'
        + "\n".join(parts) + "\n</body></html>\n"
    )


def _functions(rows: Sequence[FunctionRow]) -> Iterable[str]:
    """The table, costliest first; a share is of the time that the log knows."""
    total, largest = sum(map(_cost, rows)), max(map(_cost, rows), default=0.0)
    known = [row for row in rows if row.seconds]
    if known:
        yield (f"<p>{len(known)} of {len(rows)} functions have a measured time; one run calls them for "
               f"{fmt.seconds(total)} together.</p>")
    yield ('<table><thead><tr><th>function</th><th class="n">calls</th><th class="n">time a call</th>'
           '<th colspan="2">share</th><th class="n">work</th><th class="n">bytes</th><th class="n">roofline</th>'
           '<th class="n">rate</th><th>space</th>'
           "<th>schedule from</th></tr></thead><tbody>")
    for index, row in sorted(enumerate(rows), key=lambda item: -_cost(item[1])):
        bar = f'<div class="bar" style="width:{100 * _cost(row) / largest:.1f}%"></div>' if _cost(row) else ""
        share = f"{100 * _cost(row) / total:.1f}%" if _cost(row) else "-"
        name = f'<a href="#f{index}">{as_html(row.name)}</a>' if row.script else as_html(row.name)
        told = f"log, {row.trials} trials" if row.source == "log" else row.source
        source = told if row.source == "log" else f'<span class="untuned">{as_html(told)}</span>'
        chosen = as_html(" ".join(f"{k}={v}" for k, v in row.decisions.items()))
        work = fmt.flops(row.flops) if row.flops else "-"
        yield (
            f'<tr><td>{name}<br><code>{chosen}</code>{_nodes(row.nodes)}</td><td class="n">{row.calls}</td>'
            f'<td class="n">{fmt.seconds(row.seconds)}</td><td class="n">{share}</td><td class="share">{bar}</td>'
            f'<td class="n">{work}</td><td class="n">{fmt.bytes_(int(row.bytes)) if row.bytes else "-"}</td>'
            f'<td class="n">{fmt.seconds(row.roofline_seconds or None)}</td>'
            f'<td class="n">{fmt.rate(row.flops, row.seconds or 0.0)}</td><td>{as_html(row.space)}</td>'
            f"<td>{source}</td></tr>"
        )
    yield "</tbody></table>"


def _nodes(calls: Sequence[Sequence[str]]) -> str:
    """Which of the model's nodes a function comes from: the first call's, and all where one asks."""
    text = listed(calls)
    if not text:
        return ""
    if len(calls) == 1 and text == ", ".join(calls[0]):
        return f"<br>{as_html(text)}"
    lines = "".join(f"<li>{as_html(', '.join(call))}</li>" for call in calls)
    return f"<details><summary>{as_html(text)}</summary><ol>{lines}</ol></details>"


def _kernels(rows: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    if not rows:
        return
    yield (f"<h2>Kernels</h2><p>For {as_html(rows[0]['arch'])}. A spilled register or an array on the stack goes "
           "through memory; a multiprocessor runs as many blocks at once as registers, shared memory and threads "
           "allow.</p>")
    heads = ("threads", "blocks an SM", "registers", "spilled", "stack", "shared")
    yield ("<table><thead><tr><th>kernel</th>" + "".join(f'<th class="n">{head}</th>' for head in heads)
           + "<th>instructions</th></tr></thead><tbody>")
    for row in rows:
        numbers = [str(row[name]) for name in ("threads", "blocks", "registers")]
        numbers += [fmt.bytes_(row[name]) for name in ("spilled_bytes", "stack_bytes", "shared_bytes")]
        counted = as_html(" ".join(f"{opcode}={count}" for opcode, count in row["instructions"].items()))
        yield (f"<tr><td>{as_html(row['name'])}</td>" + "".join(f'<td class="n">{number}</td>' for number in numbers)
               + f"<td><code>{counted}</code></td></tr>")
    yield "</tbody></table>"


def _tuning(records: Sequence[Record]) -> Iterable[str]:
    if not records:
        yield ("<h2>Tuning</h2><p>The log holds no trials of these functions: each one has the schedule that ships, or "
               "its space's first seed.</p>")
        return
    failures: dict[str, int] = {}
    for record in records:
        if record.failure:
            failures[record.failure] = failures.get(record.failure, 0) + 1
    told = ", ".join(f"{count} {reason}" for reason, count in sorted(failures.items())) or "none"
    yield f"<h2>Tuning</h2><p>{len(records)} trials; failures: {as_html(told)}.</p>"
    yield f'<div class="figure">{plots.svg(plots.best_so_far(records))}</div>'


def _scripts(rows: Sequence[FunctionRow]) -> Iterable[str]:
    if any(row.script for row in rows):
        yield "<h2>Scheduled code</h2>"
    for index, row in enumerate(rows):
        if row.script:
            name = as_html(row.name)
            yield f'<details id="f{index}"><summary>{name}</summary><pre>{as_html(row.script)}</pre></details>'


def _cost(row: FunctionRow) -> float:
    """Seconds that one run of the model spends in the function, as far as is known."""
    return row.calls * (row.seconds or 0.0)
