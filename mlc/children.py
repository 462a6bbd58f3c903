"""Python processes of ours: how they are started so that they import what this one would.

``python -m`` puts the current folder before everything else, where a stray ``tvm.py`` or ``resource.py`` of the user's
would be imported instead of the real one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["command", "environment"]

_WITHOUT_CURRENT_FOLDER = (
    "import sys; del sys.path[0]; import runpy; name = sys.argv.pop(1); "
    "runpy.run_module(name, run_name='__main__', alter_sys=True)"
)


def command(module: str, *arguments: str) -> list[str]:
    """The command line that runs ``module``, which :func:`environment` lets it find."""
    if sys.version_info >= (3, 11):
        return [sys.executable, "-P", "-m", module, *arguments]
    return [sys.executable, "-c", _WITHOUT_CURRENT_FOLDER, module, *arguments]


def environment(**more: str) -> Mapping[str, str]:
    """This process's variables and ``more``, with the folder that mlc was imported from in Python's path."""
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    # the second is for Python processes that the child starts: MetaSchedule's builders, say
    return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", **more}
