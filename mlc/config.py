"""Settings (environment variables), each declared once: name, default and help."""

from __future__ import annotations

import math
import os
import re
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from mlc.errors import UsageError

__all__ = ["SETTINGS", "Setting", "get", "get_flag", "get_int", "physical_cores", "user_log_path"]


@dataclass(frozen=True)
class Setting:
    """``name`` is the environment variable."""

    name: str
    default: str
    help: str


SETTINGS = {
    s.name: s
    for s in (
        Setting("MLC_THREADS", "", "threads of compiled code; empty: the physical cores this process may use"),
        Setting("MLC_DATA_DIR", "", "folder of your tuning logs and calibrations; empty: the platform's data folder"),
        Setting("MLC_DEBUG", "0", "0: one-line errors; 1: with traceback; 2: TVM's own output too"),
        Setting("MLC_DUMP_DIR", "", "folder to write the module to after each pass; empty: none"),
        Setting("MLC_WINOGRAD", "1", "0: no Winograd convolutions (--no-winograd)"),
        Setting("MLC_SUBSTITUTIONS", "1", "0: keep a model's own graph (--no-substitutions)"),
        Setting("MLC_INTEGERS", "1", "0: quantised products in float32 (--no-integers)"),
        Setting("MLC_TOKEN", "", "the secret that workers and tuning runs share"),
        Setting("MLC_CPUINFO", "/proc/cpuinfo", "the file that lists the features of this machine's CPU"),
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


def get_flag(name: str) -> bool:
    """The value as yes or no; raises :class:`UsageError` for anything but 0 and 1."""
    text = get(name)
    if text not in ("0", "1"):
        raise UsageError(f"{name} must be 0 or 1, got {text!r}; unset it or give one of them")
    return text == "1"


@lru_cache(maxsize=1)
def _cores() -> int:
    try:
        allowed = os.sched_getaffinity(0)
    except AttributeError:  # not Linux
        return os.cpu_count() or 1
    return min(_separate(allowed), _quota(allowed))


def _separate(cpus: Collection[int], sysfs: Path = Path("/sys/devices/system/cpu")) -> int:
    """How many of ``cpus`` are cores of their own: hyper-threads of one core name the same siblings."""
    siblings = set()
    for cpu in cpus:
        try:
            siblings.add((sysfs / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip())
        except OSError:
            return max(1, len(cpus))
    return max(1, len(siblings))


def _quota(cpus: Collection[int], cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """The cores that a container's limit pays for; more threads would be stopped half of the time."""
    for name in ("cpu.max", "cpu/cpu.cfs_quota_us"):
        try:
            words = (cgroup / name).read_text().split()
            period = words[1] if len(words) > 1 else (cgroup / "cpu/cpu.cfs_period_us").read_text()
            if words[0] not in ("max", "-1"):
                return max(1, math.ceil(int(words[0]) / int(period)))
        except (OSError, ValueError, IndexError, ZeroDivisionError):
            continue
    return max(1, len(cpus))


def physical_cores() -> int:
    """Physical cores this process may run on, or what ``MLC_THREADS`` says."""
    return get_int("MLC_THREADS") or _cores()


def user_data_dir() -> Path:
    """The platform's data folder for mlc (``MLC_DATA_DIR`` moves it)."""
    if get("MLC_DATA_DIR"):
        return Path(get("MLC_DATA_DIR"))
    import platformdirs

    return Path(platformdirs.user_data_dir("mlc"))


#: characters of a log's name; what lies beside a database has longer ones, and file systems take 255
_LONGEST_NAME = 160


def user_log_path(canonical_target: str, machine: str = "") -> Path:
    """The user's own tuning log for a target; one for each class of other machines that measure for it."""
    name = canonical_target.replace("/", "-")
    if machine:
        name += "@" + re.sub(r"[^\w.-]+", "-", machine)
    if len(name) > _LONGEST_NAME:
        name = f"{name[:_LONGEST_NAME]}-{zlib.crc32(name.encode()):08x}"
    return user_data_dir() / "tuning_logs" / f"{name}.db"
