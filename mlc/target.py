"""Target resolution: the only place where a target name becomes a TVM target.

``native``                      this machine's CPU with all the features that it shows
``llvm``                        a generic CPU of this machine's architecture
``x86-64``, ``x86-64-v2|v3|v4``   the x86 levels
``aarch64``, ``aarch64:cortex-a76``   64-bit Arm under Linux: any, or a CPU by LLVM's name
``llvm -mcpu=znver3 -num-cores=4``   spelled out
``cuda``                        this machine's NVIDIA GPU
``cuda:sm_90``, ``cuda -arch=sm_90``   any GPU of an architecture
``cuda:sm_80,sm_90a``           one set of kernels, those of the least, compiled for each of several
"""

from __future__ import annotations

import difflib
import json
import platform
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from mlc.config import physical_cores
from mlc.errors import TargetError

if TYPE_CHECKING:
    import tvm

__all__ = ["FRIENDLY", "Friendly", "Target", "generation", "resolve", "several", "split"]


class Friendly(NamedTuple):
    """A target's name for users: what it stands for, as :func:`resolve` reads it, and what that is in words."""

    spelling: str
    meaning: str


#: what 64-bit Arm CPUs are under Linux; the CPU's name follows
_AARCH64 = "llvm -mtriple=aarch64-linux-gnu -mcpu="
FRIENDLY = {
    "native": Friendly("native", "this machine's CPU with all the features it shows"),
    "llvm": Friendly("llvm", "a generic CPU of this machine's architecture"),
    "x86-64": Friendly("llvm -mcpu=x86-64", "any 64-bit x86 CPU (SSE2)"),
    "x86-64-v2": Friendly("llvm -mcpu=x86-64-v2", "x86 with SSE4.2"),
    "x86-64-v3": Friendly("llvm -mcpu=x86-64-v3", "x86 with AVX2 and FMA"),
    "x86-64-v4": Friendly("llvm -mcpu=x86-64-v4", "x86 with AVX-512"),
    "sapphirerapids": Friendly("llvm -mcpu=sapphirerapids", "Intel Xeon with AMX, of the 4th generation on"),
    "graniterapids": Friendly("llvm -mcpu=graniterapids", "Intel Xeon 6 with AMX"),
    "aarch64": Friendly(f"{_AARCH64}generic", "any 64-bit Arm CPU (NEON)"),
    "aarch64:cortex-a53": Friendly(f"{_AARCH64}cortex-a53", "Arm Cortex-A53 (Raspberry Pi 3)"),
    "aarch64:cortex-a72": Friendly(f"{_AARCH64}cortex-a72", "Arm Cortex-A72 (Raspberry Pi 4)"),
    "aarch64:cortex-a76": Friendly(f"{_AARCH64}cortex-a76", "Arm Cortex-A76 with dot products (Raspberry Pi 5)"),
    "aarch64:neoverse-n1": Friendly(f"{_AARCH64}neoverse-n1", "Arm Neoverse N1 with dot products (Graviton 2)"),
    "aarch64:neoverse-v1": Friendly(f"{_AARCH64}neoverse-v1", "Arm Neoverse V1 with i8mm and bf16 (Graviton 3)"),
    "aarch64:neoverse-v2": Friendly(f"{_AARCH64}neoverse-v2", "Arm Neoverse V2 with i8mm and bf16 (Graviton 4)"),
    "cuda": Friendly("cuda", "this machine's NVIDIA GPU; sm_80 where there is none"),
    "cuda:sm_80": Friendly("cuda -arch=sm_80", "NVIDIA Ampere (A100)"),
    "cuda:sm_86": Friendly("cuda -arch=sm_86", "NVIDIA Ampere (consumer)"),
    "cuda:sm_89": Friendly("cuda -arch=sm_89", "NVIDIA Ada"),
    "cuda:sm_90": Friendly("cuda -arch=sm_90", "NVIDIA Hopper (H100, H200)"),
    "cuda:sm_90a": Friendly("cuda -arch=sm_90a", "NVIDIA Hopper with its architecture-specific instructions"),
    "cuda:sm_100": Friendly("cuda -arch=sm_100", "NVIDIA Blackwell (B200)"),
    "cuda:sm_120": Friendly("cuda -arch=sm_120", "NVIDIA Blackwell (consumer, RTX PRO)"),
}

#: architectures with instructions that no later one has
_SPECIFIC = ("90a", "100a", "120a")

#: what ``cuda`` stands for on a machine without a GPU
_DEFAULT_GPU = "sm_80"

#: attributes that the key has in a place of their own, or that do not change what a schedule means
_NOT_IN_KEY = ("kind", "mcpu", "num-cores", "model")


@dataclass(frozen=True)
class Target:
    """A resolved target: ``attrs`` is what TVM is given, ``name`` what the user wrote."""

    name: str
    attrs: str  # canonical JSON

    @cached_property
    def tvm(self) -> tvm.target.Target:
        """The TVM target, with its host for a GPU."""
        return _tvm_package().target.Target(json.loads(self.attrs))

    @property
    def kind(self) -> str:
        """``llvm`` or ``cuda``."""
        return str(json.loads(self.attrs)["kind"])

    @property
    def architecture(self) -> str:
        """The architecture of the CPU that runs the code, or that calls it: ``x86_64``, ``aarch64``, as :mod:`platform`
        names it."""
        attrs = json.loads(self.attrs)
        host = attrs.get("host", {}) if attrs["kind"] == "cuda" else attrs
        triple = str(host.get("mtriple", "")) if isinstance(host, dict) else ""
        return triple.partition("-")[0] or platform.machine()

    @property
    def threads(self) -> int:
        """CPU threads that code for this target is run with (1 for a GPU target)."""
        return int(json.loads(self.attrs).get("num-cores", 1))

    @property
    def canonical(self) -> str:
        """A short text without spaces, part of a task's key: ``llvm/znver5/2`` or ``cuda/sm_90``.

        Cache sizes and measured rates are left out: they say which schedules are promising, not what a schedule means,
        and one CPU may report them differently as a whole machine and as a part of one.
        """
        attrs = json.loads(self.attrs)
        if attrs["kind"] == "cuda":
            return f"cuda/{attrs['arch']}"
        common = f"llvm/{attrs.get('mcpu', 'generic')}/{attrs.get('num-cores', 1)}"
        others = sorted(f"{k}={','.join(v) if isinstance(v, list) else v}" for k, v in attrs.items()
                        if k not in _NOT_IN_KEY)
        return "/".join([common, *(re.sub(r"[^\w=.,+-]+", "_", other) for other in others)])


def resolve(name: str | Target | dict[str, Any], threads: int | None = None) -> Target:
    """Turn what a user wrote into a :class:`Target`; raises :class:`TargetError` with the nearest names."""
    if isinstance(name, Target):
        return name
    if isinstance(name, dict):
        return Target(str(name.get("kind", "?")), _dump(name))
    words = name.split()
    measured = _measured() if words[:1] == ["native"] else ""
    return _resolve(name.strip(), threads or physical_cores(), measured)


def several(name: str | Target | dict[str, Any] | Sequence[Any], threads: int | None = None) -> list[Target]:
    """:func:`resolve` of each target of a list, or of a text with commas; raises :class:`TargetError` for one that
    comes twice."""
    if isinstance(name, str):
        names: list[Any] = split(name)
    else:
        names = list(name) if isinstance(name, Sequence) else [name]
    if not names:
        raise TargetError("a target must be named, got none; `mlc targets` lists the names")
    found = [resolve(each, threads) for each in names]
    canonical = [target.canonical for target in found]
    twice = next((i for i, each in enumerate(canonical) if each in canonical[:i]), None)
    if twice is not None:
        raise TargetError(f"each target must be given once, but {found[twice].name} is {canonical[twice]}, as is "
                          f"{found[canonical.index(canonical[twice])].name}; leave one out")
    return found


def split(text: str) -> list[str]:
    """``"x86-64-v3,llvm -mattr=+a,+b"  -->  ["x86-64-v3", "llvm -mattr=+a,+b"]``: a comma before a target's name is one
    between two targets; options and the architectures of ``cuda:sm_80,sm_90a`` have commas too."""
    parts: list[str] = []
    for piece in text.split(","):
        name = (piece.split() or [""])[0]
        known = name in FRIENDLY or name.partition(":")[0] in FRIENDLY or not piece.strip()
        inside = parts and not known and ("=" in parts[-1] or (parts[-1].startswith("cuda:") and name[:3] == "sm_"))
        parts[-1:] = [f"{parts[-1]},{piece}"] if inside else [*parts[-1:], piece]
    return [part.strip() for part in parts]


def _measured() -> str:
    """This machine's calibration as part of a target's ``model``; a file that cannot be used gives a warning."""
    from mlc.calibration import read

    found, reason = read()
    if reason:
        warnings.warn(reason, stacklevel=3)
    return found.text() if found is not None else ""


@lru_cache(maxsize=64)
def _resolve(name: str, threads: int, measured: str) -> Target:
    words = name.split()
    if words and words[0] in FRIENDLY:
        words[:1] = FRIENDLY[words[0]].spelling.split()
    elif words and words[0].startswith("aarch64:"):
        words[:1] = (_AARCH64 + words[0].partition(":")[2]).split()
    head = words[0] if words else ""
    options: dict[str, Any] = {}
    for word in words[1:]:
        match = re.fullmatch(r"--?([\w-]+)=(\S+)", word)
        if not match:
            raise TargetError(f"target options must look like -key=value, got {word!r} in {name!r}")
        options[match[1]] = _option(match[1], match[2])
    if head.startswith("cuda"):
        return _cuda(name, head, options)
    if head == "native":
        from mlc.cpu import host_cpu, native_attrs
        from schedules.machine import native_caches

        if known := ",".join(text for text in (native_caches(), measured) if text):
            options.setdefault("model", known)
        shown = native_attrs(host_cpu())
        options["mattr"] = [*shown.get("mattr", ()), *options.get("mattr", ())]
        return _llvm(name, shown["mcpu"], threads, {key: value for key, value in options.items() if value != []})
    if head == "llvm":
        return _llvm(name, options.pop("mcpu", ""), threads, options)
    near = difflib.get_close_matches(head, FRIENDLY, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else "`mlc targets` lists the names"
    raise TargetError(f"the target must be one that `mlc targets` lists, got {name!r}; {hint}")


def _option(key: str, text: str) -> Any:
    """TVM is strict about types: lists of features, whole numbers, else text."""
    if key in ("mattr", "keys", "libs"):
        return text.split(",")
    return int(text) if text.isdigit() else text


def _llvm(name: str, mcpu: str, threads: int, options: dict[str, Any]) -> Target:
    import tvm as _tvm

    attrs: dict[str, Any] = {"kind": "llvm", "num-cores": int(options.pop("num-cores", threads))}
    if mcpu:
        triple = options.get("mtriple", str(_tvm.target.codegen.llvm_get_system_triple()))
        if not _tvm.target.codegen.llvm_is_valid_cpu(mcpu, triple):
            known = map(str, _tvm.target.codegen.llvm_get_cpu_archlist(_tvm.target.Target({"kind": "llvm",
                                                                                           "mtriple": triple})))
            near = difflib.get_close_matches(mcpu, known, n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise TargetError(f"-mcpu must name a CPU that LLVM knows for {triple}, got {mcpu!r}{hint}")
        attrs["mcpu"] = mcpu
    attrs.update(options)
    return _checked(name, attrs)


def _cuda(name: str, head: str, options: dict[str, Any]) -> Target:
    from mlc.gpu import find_gpu
    from schedules.machine import GPUS, gpu_of

    asked = str(head.partition(":")[2] or options.pop("arch", ""))
    found = find_gpu() if not asked else None
    if found is not None:
        options.setdefault("model", found.model)
        asked = found.arch
    words = (asked or _DEFAULT_GPU).split(",")
    archs = sorted({f"sm_{word.removeprefix('sm_')}" for word in words}, key=generation)
    for arch in archs:
        if gpu_of(arch) is None or (arch[-1].isalpha() and arch.removeprefix("sm_") not in _SPECIFIC):
            known = ", ".join(sorted([*(f"sm_{n}" for n in (*GPUS, *_SPECIFIC))], key=generation))
            raise TargetError(f"a CUDA architecture must be one of {known}, got {arch!r}")
    gpus = [gpu for arch in archs if (gpu := gpu_of(arch))]
    attrs: dict[str, Any] = {
        "kind": "cuda", "arch": ",".join(archs), "host": {"kind": "llvm"},
        "max_threads_per_block": min(gpu.threads_per_block for gpu in gpus),
        "max_shared_memory_per_block": min(gpu.shared_bytes for gpu in gpus), "thread_warp_size": gpus[0].warp,
    }
    attrs.update(options)
    return _checked(name, attrs)


def generation(arch: str) -> tuple[int, str]:
    """Sort key of CUDA architectures, oldest first: ``sm_90`` before ``sm_90a`` before ``sm_100``."""
    digits = "".join(filter(str.isdecimal, arch))
    return int(digits or 0), arch


def _tvm_package() -> Any:
    """TVM. An interrupt in a function of ours that TVM calls would come back from TVM as a RuntimeError, which is
    taken for a failure of what it was in, and the work would go on; by its name it comes back as what it is."""
    import tvm as _tvm
    import tvm_ffi

    tvm_ffi.register_error("KeyboardInterrupt", KeyboardInterrupt)
    return _tvm


def _checked(name: str, attrs: dict[str, Any]) -> Target:
    _tvm = _tvm_package()
    try:
        _tvm.target.Target(dict(attrs))
    except Exception as error:
        reason = str(error).strip().splitlines()[-1]
        raise TargetError(f"TVM must accept the target's options, but it refused {name!r}: {reason}") from error
    return Target(name, _dump(attrs))


def _dump(attrs: dict[str, Any]) -> str:
    return json.dumps(attrs, sort_keys=True)
