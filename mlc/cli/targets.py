"""``mlc targets``: lists the names that ``--target`` takes, and the TVM target of each."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from mlc.cli.outcome import Command, Outcome
from mlc.errors import TargetError

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["COMMAND"]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="TARGET", help="show this one only, e.g. 'llvm -mcpu=znver3'")


def _execute(args: argparse.Namespace) -> Outcome:
    from mlc.target import FRIENDLY, resolve

    if args.name:
        target = resolve(args.name)
        rows = [_row(args.name, FRIENDLY[args.name].meaning if args.name in FRIENDLY else "", target)]
    else:
        rows = []
        for name, friendly in FRIENDLY.items():
            try:
                rows.append(_row(name, friendly.meaning, resolve(name)))
            except TargetError:  # an x86 level on another architecture
                continue
    return Outcome({"targets": rows}, lambda console: _render(rows, console))


def _row(name: str, meaning: str, target: Any) -> dict[str, Any]:
    import json

    return {"name": name, "meaning": meaning, "canonical": target.canonical, "kind": target.kind,
            "threads": target.threads, "attrs": json.loads(target.attrs)}


def _render(rows: list[dict[str, Any]], console: Console) -> None:
    from mlc.report.tables import table

    console.print(table(("name", "is", "meaning"), [(r["name"], r["canonical"], r["meaning"]) for r in rows]))
    console.print("also: aarch64:CPU, 'llvm -mcpu=CPU -num-cores=N', 'cuda -arch=sm_NN'")
    console.print("several GPUs: cuda:sm_80,cuda:sm_90a has kernels of each in one file, "
                  "cuda:sm_80,sm_90a those of the least, compiled for each")


COMMAND = Command("targets", "list what --target takes", _add_arguments, _execute)
