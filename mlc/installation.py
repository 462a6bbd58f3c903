"""Do the installed packages fit together? Answered from package metadata, before anything is imported.

TVM's wheel asks for its FFI package without an upper bound, and a later one crashes the process; so the pins in
mlc's own metadata are compared with what is installed before ``import tvm`` runs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata

from mlc.errors import InstallationError

__all__ = ["Pin", "check_pins", "installed", "pins"]


@dataclass(frozen=True)
class Pin:
    """An exact requirement of mlc and what was found (None: not installed)."""

    package: str
    wanted: str
    found: str | None

    @property
    def ok(self) -> bool:
        return self.found == self.wanted


@cache  # every compile asks
def installed(package: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def pins() -> tuple[Pin, ...]:
    """Every requirement of mlc that is pinned to one version (extras left out)."""
    try:
        requirements = _requirements()
    except metadata.PackageNotFoundError:
        raise InstallationError("mlc must be installed, not only importable; run `pip install -e .`") from None
    exact = (re.fullmatch(r"([\w.-]+)\s*==\s*([\w.+]+)", line) for line in requirements)
    return tuple(Pin(m[1], m[2], installed(m[1])) for m in exact if m)


@cache
def _requirements() -> Sequence[str]:
    return metadata.requires("mlc") or []


def check_pins() -> None:
    """Raise :class:`InstallationError` naming what to install where a pinned package has another version."""
    found = pins()
    if all(pin.ok for pin in found):
        return
    have = ", ".join(f"{p.package} {p.found or 'missing'}" for p in found)
    want = " ".join(f"{p.package}=={p.wanted}" for p in found)
    raise InstallationError(f"TVM's packages must have exact versions, but found {have}; run `pip install {want}`")
