"""One look for every table: a header, no frame, numbers to the right."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table

__all__ = ["table"]


def table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, right: Sequence[str] = (), title: str | None = None,
    bold: Sequence[int] = (),
) -> Table:
    """A table of the given columns; those named in ``right`` are aligned to the right, rows in ``bold`` stand out."""
    out = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", show_edge=False, pad_edge=False)
    for column in columns:
        out.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for number, row in enumerate(rows):
        out.add_row(*(str(cell) for cell in row), style="bold" if number in bold else None)
    return out
