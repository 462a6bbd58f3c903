"""mlc: a tensor-program autotuning compiler on Apache TVM.

:func:`mlc.compile`, :func:`mlc.tune` and :func:`mlc.load` are defined in :mod:`mlc.api`. ``import mlc`` is cheap: names
are imported from their modules when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlc.api import compile, load, tune
    from mlc.artifact import Executable
    from mlc.compilation import Compilation
    from mlc.errors import MlcError
    from mlc.generator import Generator
    from mlc.sampler import Sampler

    __version__: str

__all__ = ["Compilation", "Executable", "Generator", "MlcError", "Sampler", "__version__", "compile", "load", "tune"]

_HOMES = {
    "Compilation": "compilation", "Executable": "artifact", "Generator": "generator", "MlcError": "errors",
    "Sampler": "sampler", "compile": "api", "load": "api", "tune": "api",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from mlc.installation import installed

        return installed("mlc")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"mlc.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
