"""Shows the current step of a build on one line of a terminal.

The steps are what ``logging.getLogger("mlc.build")`` is told at its level INFO, so that a program that builds through
Python can show or keep them too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

__all__ = ["building", "steps"]

_BUILD = "mlc.build"


@contextmanager
def building(console: Console, doing: str) -> Iterator[None]:
    """Show in a terminal what is being done, its latest step, and for how long; show nothing elsewhere."""
    if not console.is_terminal:
        yield
        return
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(doing, total=None)
        with steps(lambda step: progress.update(task, description=f"{doing}: {step}")):
            yield


@contextmanager
def steps(show: Callable[[str], None]) -> Iterator[None]:
    """Tell ``show`` each step of the builds in this block."""
    logger, handler = logging.getLogger(_BUILD), _Teller(show)
    level = logger.level
    logger.addHandler(handler)
    if not logger.isEnabledFor(logging.INFO):
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class _Teller(logging.Handler):
    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        self._show(record.getMessage())
