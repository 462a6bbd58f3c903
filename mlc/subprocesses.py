"""How mlc starts Python subprocesses: with the same import path as this process, and without PyTorch.

``python -m`` puts the current folder before everything else, where a stray ``tvm.py`` or ``resource.py`` of the user's
would be imported instead of the real one.

TVM imports PyTorch wherever it is installed, to be ready for its tensors: three quarters of the time that its own
import takes, and half of the memory. A process that is mlc's own, a command or a worker, is handed none.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["command", "environment", "import_tvm"]

_RUN = "import runpy; name = sys.argv.pop(1); runpy.run_module(name, run_name='__main__', alter_sys=True)"


def command(module: str, *arguments: str, torch: bool = False) -> list[str]:
    """The command line that runs ``module``, which :func:`environment` lets it find; it may import ``torch``."""
    return _command([module, *arguments], torch, has_flag=sys.version_info >= (3, 11))


def _command(words: list[str], torch: bool, has_flag: bool) -> list[str]:
    """``has_flag``: whether this Python has one that leaves the current folder out."""
    steps = ["import sys", *([] if has_flag else ["del sys.path[0]"]),
             *([] if torch else ["sys.modules['torch'] = None"]), _RUN]
    return [sys.executable, *(["-P"] if has_flag else []), "-c", "; ".join(steps), *words]


def import_tvm() -> None:
    """Import TVM without PyTorch, which can be imported afterwards; nothing where either is imported already.

    What was imported stays for good: the garbage collector no longer looks at it.
    """
    if "torch" in sys.modules or "tvm_ffi" in sys.modules:
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # it raises ImportError, as if there were none
    try:
        import tvm.relax
        import tvm.s_tir  # noqa: F401
    finally:
        del sys.modules["torch"]
    gc.freeze()


def environment(**more: str) -> Mapping[str, str]:
    """This process's variables and ``more``, with the folder that mlc was imported from in Python's path."""
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    # the second is for Python processes that the child starts: MetaSchedule's builders, say
    return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", **more}
