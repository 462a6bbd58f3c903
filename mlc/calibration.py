"""The calibration of this machine: a small file with the user's data, written by ``mlc doctor --calibrate``.

It holds the figures of :data:`schedules.machine.FACTS`, and only the target ``native`` reads it: they join the cache
sizes in the target's text. A task's key leaves that text out, so records mean the same with and without. Figures are
rounded to two digits, and one file always gives the same text, hence the same seeds.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlc.config import user_data_dir
from mlc.cpu import host_cpu, machine_id, native_attrs

__all__ = ["Calibration", "calibration_path", "identity", "read", "write"]

_VERSION = 1
_AGAIN = "`mlc doctor --calibrate` measures anew"
_LARGEST = 1e6


@dataclass(frozen=True)
class Calibration:
    """``facts`` by the names of :data:`schedules.machine.FACTS`, in the units given there, measured on ``machine``."""

    machine: str
    facts: Mapping[str, float]

    def text(self) -> str:
        """The calibration as part of a target's ``model``: ``ghz=3.7,fma=1``; unknown names (of a later version) are
        omitted."""
        from schedules.machine import FACTS

        return ",".join(f"{name}={_rounded(self.facts[name])}" for name in FACTS if name in self.facts)


def _rounded(value: float) -> str:
    """Two significant digits, without an exponent."""
    return f"{float(f'{value:.2g}'):f}".rstrip("0").rstrip(".")


def identity() -> str:
    """Which machine this is, down to the instructions that it shows: what a calibration holds for."""
    attrs = native_attrs(host_cpu())
    return ", ".join([machine_id(), str(attrs["mcpu"]), *attrs.get("mattr", ())])


def calibration_path() -> Path:
    """The file of this machine; home directories may be shared by several machines."""
    return user_data_dir() / "calibrations" / f"{zlib.crc32(identity().encode()):08x}.json"


def write(calibration: Calibration) -> Path:
    """Keep a calibration: the whole file or none. Raises ``OSError`` where that is impossible."""
    path = calibration_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = {"version": _VERSION, "machine": calibration.machine, "facts": dict(calibration.facts)}
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(json.dumps({**fields, "checksum": _checksum(fields)}, indent=1) + "\n", encoding="utf-8")
    part.replace(path)
    return path


def read() -> tuple[Calibration | None, str]:
    """This machine's calibration, or None with the reason in one line why it is not used (empty: there is none)."""
    path = calibration_path()
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None, ""
    except (OSError, ValueError, RecursionError) as error:
        return None, f"a calibration must be a readable file, but {path} is not ({type(error).__name__}); {_AGAIN}"
    reason = _wrong(fields)
    if reason:
        return None, f"{path} is not used: {reason}; {_AGAIN}"
    return Calibration(fields["machine"], fields["facts"]), ""


def _wrong(fields: Any) -> str:
    """Why a file's content is no calibration of this machine; empty where it is one."""
    if not isinstance(fields, dict) or fields.get("version") != _VERSION:
        found = fields.get("version", "none") if isinstance(fields, dict) else "none"
        return f"a calibration must have version {_VERSION}, got {found!r:.40}"
    if fields.pop("checksum", None) != _checksum(fields):
        return "it must match its checksum, but is damaged"
    facts = fields.get("facts")
    if not isinstance(facts, dict) or not all(_is_fact(value) for value in facts.values()):
        return "its figures must be positive numbers"
    if fields.get("machine") != identity():
        return f"it must be of this machine, {identity()}, but is of {fields.get('machine')!r:.120}"
    return ""


def _is_fact(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0.0 < value < _LARGEST


def _checksum(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
