"""Makes untrusted text (names in a model, file names, messages of libraries) safe for a terminal or a page."""

from __future__ import annotations

import html

__all__ = ["as_html", "one_line", "visible"]


def visible(text: str) -> str:
    """The text with everything but printable characters and ends of lines written as escapes.

    ``\\x1b`` instead of the character that starts a terminal's commands, ``\\u202e`` instead of the one that turns
    the direction of writing, ``\\udcff`` instead of a byte that is no UTF-8. The result can be encoded as UTF-8.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else _escape(c) for c in text)


def one_line(text: str) -> str:
    """The text as :func:`visible` shows it, on one line: every run of white space is one space."""
    return visible(" ".join(text.split()))


def as_html(text: str) -> str:
    """The text inside an element or an attribute of HTML or SVG."""
    return html.escape(visible(text))


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
