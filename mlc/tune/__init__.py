"""The search: strategies that propose, the allocation of trials to tasks, the session that measures and records.

Called, ``mlc.tune(model, ...)`` is the function :func:`mlc.api.tune`; see ``help(mlc.api.tune)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlc.tune.options import TuneOptions
    from mlc.tune.report import TuneReport
    from mlc.tune.session import tune_tasks

__all__ = ["TuneOptions", "TuneReport", "tune_tasks"]

_HOMES = {"TuneOptions": "options", "TuneReport": "report", "tune_tasks": "session"}


def __getattr__(name: str) -> Any:
    # the command line's parser asks for the options alone and must not wait for TVM
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"mlc.tune.{_HOMES[name]}"), name)
