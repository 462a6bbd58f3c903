"""The consoles that every command prints through.

Their width doesn't depend on luck: a terminal's own, or wide enough for our tables in a pipe. Strings are text and
nothing else: no markup, and what a terminal would take for a command is shown. Style comes from ``rich.text.Text``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from mlc.text import visible

__all__ = ["stderr_console", "stdout_console"]

_PIPE_WIDTH = 140


def stdout_console() -> Console:
    """The console for results."""
    return _console(stderr=False)


def stderr_console() -> Console:
    """The console for progress."""
    return _console(stderr=True)


class _PlainConsole(Console):
    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **options)  # first, so that columns are as wide as what is shown

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """What any renderable prints; ``control`` is set on what rich itself has to tell the terminal."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


def _console(stderr: bool) -> Console:
    options: dict[str, Any] = {"stderr": stderr, "highlight": False, "markup": False, "emoji": False}
    console = _PlainConsole(**options)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = _PlainConsole(**options, width=_PIPE_WIDTH)
    return console
