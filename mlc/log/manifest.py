"""Checksums of the shipped files: ``tuning_logs/checksums.json``, from ``<folder>/<file>`` to its SHA-256.

The tools that write such a file note its checksum, whoever reads one compares. A file that is not listed was put there
by hand, and is taken as it is.
"""

from __future__ import annotations

import hashlib
import json
from importlib import resources
from pathlib import Path

from mlc.errors import LogError

__all__ = ["NAME", "check", "check_complete", "note", "ships"]

NAME = "checksums.json"


def check(path: Path) -> None:
    """Raise :class:`LogError` where a shipped file is not what its checksum says, or cannot be read."""
    expected = _read(path.parents[1]).get(f"{path.parent.name}/{path.name}")
    if expected is not None and _digest(path) != expected:
        raise LogError(f"a shipped file must match its checksum, but {path} is damaged or was changed; reinstall mlc")


def check_complete(folder: Path) -> None:
    """Raise :class:`LogError` where a file that ships in ``folder`` is missing."""
    for name in _read(folder.parent):
        if name.startswith(f"{folder.name}/") and not (folder.parent / name).is_file():
            raise LogError(f"a shipped file must be there, but {folder.parent / name} is missing; reinstall mlc")


def ships(path: Path) -> bool:
    """Whether a file lies where shipped ones do."""
    with resources.as_file(resources.files("tuning_logs")) as root:
        return path.resolve().parent.parent == root.resolve()


def note(path: Path) -> None:
    """Note the checksum of a file that was written; those of files that are gone are dropped."""
    root = path.parents[1]
    known = {**_read(root), f"{path.parent.name}/{path.name}": _digest(path)}
    kept = {name: known[name] for name in sorted(known) if (root / name).is_file()}
    part = root / f"{NAME}.part"
    part.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    part.replace(root / NAME)


def _read(root: Path) -> dict[str, str]:
    path = root / NAME
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise LogError(f"the checksums of shipped files must be readable, but {path} is not; reinstall mlc") from error
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise LogError(f"the checksums of shipped files must be a JSON object of texts, but {path} is not; "
                       "reinstall mlc")
    return found


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise LogError(f"a shipped file must be readable, but {path} is not ({error.strerror}); "
                       "reinstall mlc") from error
