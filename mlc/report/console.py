"""Consoles whose width doesn't depend on luck: a terminal's own, or wide enough for our tables in a pipe."""

from __future__ import annotations

import os

from rich.console import Console

__all__ = ["stderr_console", "stdout_console"]

_PIPE_WIDTH = 140


def stdout_console() -> Console:
    """Where results go."""
    return _console(stderr=False)


def stderr_console() -> Console:
    """Where progress goes."""
    return _console(stderr=True)


def _console(stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(stderr=stderr, highlight=False, width=_PIPE_WIDTH)
    return console
