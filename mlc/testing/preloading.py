"""C sources of the tests that are compiled into libraries for ``LD_PRELOAD``."""

from __future__ import annotations

import atexit
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

__all__ = ["compiled"]


@lru_cache
def compiled(source: Path) -> Path:
    """The shared library of a C source, made by ``cc`` once for this process and its children, as long as this process
    lives."""
    folder = Path(tempfile.mkdtemp(prefix=f"mlc-{source.stem}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    made = folder / f"{source.stem}.so"
    subprocess.run(["cc", "-O2", "-Wall", "-shared", "-fPIC", "-o", str(made), str(source), "-ldl"], check=True)
    return made
