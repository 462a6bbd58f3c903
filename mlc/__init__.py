"""mlc: a tensor-program autotuning compiler on Apache TVM.

:func:`mlc.compile`, :func:`mlc.tune` and :func:`mlc.load` are in :mod:`mlc.api`; ``import mlc`` itself imports nothing.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlc.api import compile, load, tune
    from mlc.build import Executable
    from mlc.errors import MlcError

__all__ = ["Executable", "MlcError", "compile", "load", "tune"]

_HOMES = {"compile": "api", "load": "api", "Executable": "build", "MlcError": "errors"}


def __getattr__(name: str) -> Any:
    if name == "tune":
        return import_module("mlc.tune")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"mlc.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Tune(ModuleType):
    """``mlc.tune`` is a room and, called, the function :func:`mlc.api.tune`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return import_module("mlc.api").tune(*args, **kwargs)


class _Package(ModuleType):
    """Sees when the import system puts the room ``tune`` where the function of that name is looked for."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "tune" and type(value) is ModuleType:
            value.__class__ = _Tune
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
