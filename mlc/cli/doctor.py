"""``mlc doctor``: what is installed, what this machine is, and what is wrong with either."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from mlc.cli.outcome import Command, Outcome

if TYPE_CHECKING:
    from rich.console import Console

    from mlc.cli.probes import Finding

__all__ = ["COMMAND"]

_MARK = {"ok": ("ok", "green"), "note": ("-", "dim"), "wrong": ("wrong", "bold red")}  # a word and its style


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser  # takes nothing but --json and --debug


def _execute(args: argparse.Namespace) -> Outcome:
    from mlc.cli.probes import examine

    findings = examine()
    wrong = [f for f in findings if f.state == "wrong"]
    document = {
        "ok": not wrong,
        "findings": [{"name": f.name, "state": f.state, "value": f.value, "remedy": f.remedy} for f in findings],
    }
    return Outcome(document, lambda console: _render(findings, console), exit_code=1 if wrong else 0)


def _render(findings: list[Finding], console: Console) -> None:
    from rich.text import Text

    from mlc.report.tables import table

    console.print(table(("", "what", "found"), [(Text(*_MARK[f.state]), f.name, f.value) for f in findings]))
    wrong = [f for f in findings if f.state == "wrong"]
    for finding in wrong:
        console.print(Text.assemble((finding.name, "bold red"), f": {finding.value}; {finding.remedy}"))
    if not wrong:
        console.print("nothing is wrong with this installation")


COMMAND = Command("doctor", "check the installation and this machine", _add_arguments, _execute, needs_tvm=False)
