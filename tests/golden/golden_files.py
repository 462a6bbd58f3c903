"""What the fixture ``golden`` is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

__all__ = ["Golden"]

#: ``golden(name, text)`` compares the text with the file, or writes it
Golden: TypeAlias = Callable[[str, str], None]
