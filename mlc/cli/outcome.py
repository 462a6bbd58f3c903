"""A command and its outcome: a JSON document for scripts and a view of it for people."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Command", "Outcome", "run_chosen"]


@dataclass(frozen=True)
class Outcome:
    """``document`` is what ``--json`` prints; ``render`` prints the same for a person."""

    document: dict[str, Any]
    render: Callable[[Console], None] | None = None
    exit_code: int = 0


@dataclass(frozen=True)
class Command:
    """One command. ``needs_tvm`` asks for the version check that must come before importing TVM."""

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    execute: Callable[[argparse.Namespace], Outcome]
    needs_tvm: bool = True
    epilog: str = ""


def run_chosen(args: argparse.Namespace) -> Outcome:
    """Run the subcommand that was chosen."""
    outcome: Outcome = args.run(args)
    return outcome
