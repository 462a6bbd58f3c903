"""Building an artifact, one file, from the log's best schedules and packed weights; loading and running it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlc.artifact.compile import ModelMeta, compile_module
    from mlc.artifact.executable import Bundle, Executable, load

__all__ = ["Bundle", "Executable", "ModelMeta", "compile_module", "load"]

_HOMES = {"ModelMeta": "compile", "compile_module": "compile", "Bundle": "executable", "Executable": "executable",
          "load": "executable"}


def __getattr__(name: str) -> Any:
    # whoever loads an artifact must not wait for the compiler
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"mlc.artifact.{_HOMES[name]}"), name)
