"""Tuning: search strategies, the allocation of trials to tasks, and the session that measures and records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlc.tuning.options import TuneOptions
    from mlc.tuning.report import TuneReport
    from mlc.tuning.session import tune_tasks

__all__ = ["TuneOptions", "TuneReport", "tune_tasks"]

_HOMES = {"TuneOptions": "options", "TuneReport": "report", "tune_tasks": "session"}


def __getattr__(name: str) -> Any:
    # the command line's parser asks for the options alone and must not wait for TVM
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"mlc.tuning.{_HOMES[name]}"), name)
