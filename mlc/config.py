"""Every setting, declared once: its name in the environment, its default, and what it does."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from mlc.errors import UsageError

__all__ = ["SETTINGS", "Setting", "get", "get_int", "physical_cores", "user_log_path"]


@dataclass(frozen=True)
class Setting:
    """``name`` is the environment variable."""

    name: str
    default: str
    help: str


SETTINGS = {
    s.name: s
    for s in (
        Setting("MLC_THREADS", "", "threads used by compiled code; empty: the physical cores this process may use"),
        Setting("MLC_DATA_DIR", "", "where the user's own tuning logs live; empty: the platform's data folder"),
        Setting("MLC_DEBUG", "0", "0: one-line errors; 1: with the trace; 2: TVM's own output too"),
        Setting("MLC_DUMP_DIR", "", "a folder for intermediate modules; empty: none are written"),
        Setting("MLC_NVCC", "nvcc", "the CUDA compiler used for cuda targets"),
    )
}


def get(name: str) -> str:
    """The value of a declared setting."""
    return os.environ.get(name) or SETTINGS[name].default


def get_int(name: str) -> int:
    """The value as a whole number; raises :class:`UsageError` for anything else."""
    text = get(name)
    try:
        return int(text or "0")
    except ValueError:
        raise UsageError(f"{name} must be a whole number, got {text!r}; unset it or give a number") from None


@lru_cache(maxsize=1)
def _cores() -> int:
    try:
        allowed = os.sched_getaffinity(0)
    except AttributeError:  # not Linux
        return os.cpu_count() or 1
    seen = set()
    for cpu in allowed:
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            package = (topology / "physical_package_id").read_text().strip()
            core = (topology / "core_id").read_text().strip()
        except OSError:
            return len(allowed)
        seen.add((package, core))
    return max(1, len(seen))


def physical_cores() -> int:
    """Physical cores this process may run on, or what ``MLC_THREADS`` says."""
    return get_int("MLC_THREADS") or _cores()


def user_data_dir() -> Path:
    """The platform's data folder for mlc (``MLC_DATA_DIR`` moves it)."""
    if get("MLC_DATA_DIR"):
        return Path(get("MLC_DATA_DIR"))
    import platformdirs

    return Path(platformdirs.user_data_dir("mlc"))


def user_log_path(canonical_target: str) -> Path:
    """The user's own tuning log for a target."""
    return user_data_dir() / "tuning_logs" / f"{canonical_target.replace('/', '-')}.db"
