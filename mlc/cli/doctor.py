"""``mlc doctor``: checks the installation and this machine."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mlc.cli.outcome import Command, Outcome

if TYPE_CHECKING:
    from rich.console import Console

    from mlc.cli.calibration import Figure
    from mlc.cli.probes import Finding

__all__ = ["COMMAND"]

_MARK = {"ok": ("ok", "green"), "note": ("-", "dim"), "wrong": ("wrong", "bold red")}  # a word and its style


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--calibrate", action="store_true",
        help="measure this machine's clock, execution units, caches, memory and threads for some seconds, and store "
             "the result with your data, for untuned schedules and estimates of the target `native`")
    parser.add_argument("--executor", default="local", metavar="E",
                        help="also check the cluster or the tracker that `mlc tune --executor E` would use")


def _execute(args: argparse.Namespace) -> Outcome:
    from mlc.cli.probes import examine

    findings = examine(args.executor)
    wrong = [f for f in findings if f.state == "wrong" and not (args.calibrate and f.name == "calibration")]
    shown: list[Figure] = []
    note, kept = "", True
    if not wrong:
        shown, note, kept = _figures(args.calibrate)
    document: dict[str, Any] = {
        "ok": not wrong,
        "findings": [{"name": f.name, "state": f.state, "value": f.value, "remedy": f.remedy} for f in findings],
        "machine": [asdict(figure) for figure in shown],
    }
    if args.calibrate:
        document |= {"calibrated": bool(shown) and kept, "note": note}
    return Outcome(document, lambda console: _render(findings, wrong, shown, note, console),
                   exit_code=1 if wrong or not kept else 0)


def _figures(calibrate: bool) -> tuple[list[Figure], str, bool]:
    """The machine's figures, what there is to say about them, and whether those just measured were kept."""
    from mlc.calibration import read
    from mlc.cli.calibration import figures, measure

    if calibrate:
        kept, shown, note = measure()
        return shown, note, kept is not None
    found, _ = read()
    return figures(found.facts if found is not None else {}), "", True


def _render(
    findings: list[Finding], wrong: list[Finding], shown: list[Figure], note: str, console: Console
) -> None:
    from rich.text import Text

    from mlc.report.tables import table

    console.print(table(("", "what", "found"), [(Text(*_MARK[f.state]), f.name, f.value) for f in findings]))
    if shown:
        rows = [(f.what, _number(f.described), _number(f.measured), f.unit) for f in shown]
        console.print()
        console.print(table(("this machine", "described", "measured", ""), rows, right=("described", "measured")))
    if note:
        console.print(Text(note))
    for finding in wrong:
        console.print(Text.assemble((finding.name, "bold red"), f": {finding.value}; {finding.remedy}"))
    if not wrong:
        console.print("nothing is wrong with this installation")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


COMMAND = Command("doctor", "check the installation and this machine", _add_arguments, _execute, needs_tvm=False)
