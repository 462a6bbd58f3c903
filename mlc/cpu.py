"""The CPU that this machine reports: its LLVM name, and the instructions that may be used.

LLVM names a CPU by its family and takes all that the family has. A virtual machine may hide a part of that (AVX-512 of
a Zen 4, AMX of a Xeon), and code that uses what is hidden dies by an illegal instruction; or it gives the number of
another family, and half of the CPU lies idle (AMX of a Xeon that bears a desktop CPU's number). So a feature counts if
the CPU itself answers for it (LLVM asks ``cpuid``, and whether the system saves the registers) and the kernel lists it
in ``/proc/cpuinfo``, where that can be read; the setting ``MLC_CPUINFO`` names another file to read instead. Linux
lists AMX before a process may use its tiles, which it must ask for (:func:`tiles_granted`): where it is refused, the
CPU shows no AMX.
"""

from __future__ import annotations

import ctypes
import platform
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from mlc.config import get, physical_cores

__all__ = [
    "FLAGS", "HostCpu", "arm_core", "cpu_model", "detected_features", "host_cpu", "host_flags", "machine_id",
    "native_attrs", "tiles_denied", "tiles_granted", "usable_flags",
]

#: Features that LLVM's code generators use by themselves or that tensor intrinsics ask for -> the name of each in
#: /proc/cpuinfo. Those of the system (pku, waitpkg, wbnoinvd, ...) are left out: no generated code has them.
_X86 = {
    "sse3": "pni", "ssse3": "ssse3", "sse4.1": "sse4_1", "sse4.2": "sse4_2", "sse4a": "sse4a", "popcnt": "popcnt",
    "lzcnt": "abm", "movbe": "movbe", "bmi": "bmi1", "bmi2": "bmi2", "adx": "adx", "cx16": "cx16", "f16c": "f16c",
    "avx": "avx", "avx2": "avx2", "fma": "fma", "fma4": "fma4", "xop": "xop", "tbm": "tbm", "aes": "aes",
    "pclmul": "pclmulqdq", "vaes": "vaes", "vpclmulqdq": "vpclmulqdq", "gfni": "gfni", "sha": "sha_ni",
    "avxvnni": "avx_vnni", "avxifma": "avx_ifma", "avxvnniint8": "avx_vnni_int8", "avxneconvert": "avx_ne_convert",
    "avx512f": "avx512f", "avx512cd": "avx512cd", "avx512bw": "avx512bw", "avx512dq": "avx512dq",
    "avx512vl": "avx512vl", "avx512ifma": "avx512ifma", "avx512vbmi": "avx512vbmi", "avx512vbmi2": "avx512_vbmi2",
    "avx512vnni": "avx512_vnni", "avx512bitalg": "avx512_bitalg", "avx512vpopcntdq": "avx512_vpopcntdq",
    "avx512bf16": "avx512_bf16", "avx512fp16": "avx512_fp16", "avx512vp2intersect": "avx512_vp2intersect",
    "amx-tile": "amx_tile", "amx-int8": "amx_int8", "amx-bf16": "amx_bf16", "amx-fp16": "amx_fp16",
    "prfchw": "3dnowprefetch",
}
_ARM = {
    "neon": "asimd", "fullfp16": "asimdhp", "fp16fml": "asimdfhm", "dotprod": "asimddp", "rdm": "asimdrdm",
    "complxnum": "fcma", "jsconv": "jscvt", "lse": "atomics", "rcpc": "lrcpc", "aes": "aes", "sha2": "sha2",
    "sha3": "sha3", "sm4": "sm4", "sve": "sve", "sve2": "sve2", "bf16": "bf16", "i8mm": "i8mm",
}
#: by architecture as ``platform.machine`` names it
FLAGS: Mapping[str, Mapping[str, str]] = {"x86_64": _X86, "aarch64": _ARM}
#: LLVM's names of Arm's own cores by part number, as Arm's Technical Reference Manuals give it (MIDR_EL1)
_ARM_PARTS = {
    0xD03: "cortex-a53", 0xD04: "cortex-a35", 0xD05: "cortex-a55", 0xD07: "cortex-a57", 0xD08: "cortex-a72",
    0xD09: "cortex-a73", 0xD0A: "cortex-a75", 0xD0B: "cortex-a76", 0xD0C: "neoverse-n1", 0xD0D: "cortex-a77",
    0xD40: "neoverse-v1", 0xD41: "cortex-a78", 0xD44: "cortex-x1", 0xD46: "cortex-a510", 0xD47: "cortex-a710",
    0xD48: "cortex-x2", 0xD49: "neoverse-n2", 0xD4D: "cortex-a715", 0xD4E: "cortex-x3", 0xD4F: "neoverse-v2",
}
_ARM_LIMITED = 0x41  # the implementer
#: the system call of x86-64 Linux, its request, and the component of the state that holds tiles
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA = 158, 0x1023, 18
#: what every CPU of an architecture has
_BASELINE = {"x86_64": frozenset[str](), "aarch64": frozenset({"neon"})}
#: CPUs without a name: these stand for all that have their features, widest first
_LEVELS = {"x86_64": ("x86-64-v4", "x86-64-v3", "x86-64-v2", "x86-64"), "aarch64": ("generic",)}


@dataclass(frozen=True)
class HostCpu:
    """What is known of a CPU: its architecture, LLVM's ``name`` for it, the kernel's ``flags`` (None: unreadable), and
    which of LLVM's features it answers for itself (``detected``; a feature that is not in it was not asked for)."""

    architecture: str
    name: str
    flags: frozenset[str] | None
    detected: Mapping[str, bool] = field(default_factory=dict)

    def shows(self, feature: str) -> bool:
        """Whether code may use one of LLVM's features; what nothing is known of may not be used."""
        if self.detected.get(feature) is False:
            return False
        flag = FLAGS.get(self.architecture, {}).get(feature)
        if self.flags is not None and flag is not None:
            return flag in self.flags
        return feature in self.detected or feature in _BASELINE.get(self.architecture, ())

    def hidden(self, features: Iterable[str]) -> tuple[str, ...]:
        """Those of ``features`` that code generators use and this CPU does not report, sorted."""
        known = FLAGS.get(self.architecture, {})
        return tuple(sorted(f for f in features if f in known and not self.shows(f)))


@lru_cache(maxsize=1)
def host_cpu() -> HostCpu:
    """This machine's CPU."""
    from tvm.target import codegen

    return HostCpu(platform.machine(), str(codegen.llvm_get_system_cpu()), host_flags(), detected_features())


@lru_cache(maxsize=1)
def detected_features() -> Mapping[str, bool]:
    """For each of LLVM's features, whether this machine's CPU reports it (through ``cpuid``); empty if TVM has no LLVM.
    """
    import tvm_ffi

    detect = tvm_ffi.get_global_func("tvm.codegen.llvm.GetHostCPUFeatures", allow_missing=True)
    return {} if detect is None else {str(name): bool(there) for name, there in detect().items()}


def native_attrs(cpu: HostCpu, triple: str = "") -> dict[str, Any]:
    """``mcpu`` and ``mattr`` of a target whose code runs on ``cpu`` (``triple`` left out: this machine's).

    A name that LLVM knows is kept, since it chooses the scheduling model, unless another has just what the CPU shows
    (:func:`_name`). Without one the widest level of the architecture takes its place. Either has a minus for what is
    hidden and a plus for what the CPU shows beyond it.
    """
    from tvm.target import codegen

    known = codegen.llvm_is_valid_cpu(cpu.name, triple or str(codegen.llvm_get_system_triple()))
    name = _name(cpu, triple) if known and cpu.name != "generic" else _level(cpu, triple)
    minus = [f"-{feature}" for feature in _roots(name, cpu.hidden(_enabled(name, triple)), triple)]
    beyond = [f"+{feature}" for feature in sorted(_shown(cpu) - _enabled(name, triple))]
    # one that needs what is hidden is of no use
    plus = [feature for feature in beyond if not cpu.hidden(_enabled(name, triple, [*minus, feature]))]
    return {"mcpu": name, **({"mattr": [*minus, *plus]} if minus or plus else {})}


def _shown(cpu: HostCpu) -> frozenset[str]:
    return frozenset(feature for feature in FLAGS.get(cpu.architecture, {}) if cpu.shows(feature))


def _name(cpu: HostCpu, triple: str) -> str:
    """The CPU's own name; where it shows more than an x86 CPU of that name has, that of another which has more of it
    and nothing besides, if there is one: a number that a hypervisor made up says nothing of the units behind it."""
    import tvm
    from tvm.target import codegen

    shown = _shown(cpu)
    if cpu.architecture != "x86_64" or shown <= _enabled(cpu.name, triple):
        return cpu.name
    attrs: dict[str, Any] = {"kind": "llvm", **({"mtriple": triple} if triple else {})}
    names = sorted(map(str, codegen.llvm_get_cpu_archlist(tvm.target.Target(attrs))), reverse=True)
    missed = {
        name: len(shown - features)
        for name in names if not cpu.hidden(features := _enabled(name, triple))
    }
    # of CPUs that have the same features (a generation and its refresh) any will do: the first of the list
    best = min(missed, key=missed.__getitem__, default=cpu.name)
    return best if missed[best] < len(shown - _enabled(cpu.name, triple)) else cpu.name


def _level(cpu: HostCpu, triple: str) -> str:
    """The first level that hides nothing; the last one is every CPU's."""
    levels = _LEVELS.get(cpu.architecture, ("generic",))
    return next((level for level in levels if not cpu.hidden(_enabled(level, triple))), levels[-1])


def _enabled(mcpu: str, triple: str, mattr: Iterable[str] = ()) -> frozenset[str]:
    """LLVM's features of a CPU."""
    import tvm
    from tvm.target import codegen

    attrs: dict[str, Any] = {"kind": "llvm", "mcpu": mcpu}
    attrs |= {"mtriple": triple} if triple else {}
    attrs |= {"mattr": list(mattr)} if mattr else {}
    return frozenset(str(feature) for feature in codegen.llvm_get_cpu_features(tvm.target.Target(attrs)))


def _roots(mcpu: str, hidden: tuple[str, ...], triple: str) -> tuple[str, ...]:
    """The fewest of ``hidden`` whose absence takes all of them away: without avx512f no other part of AVX-512 is left.

    Greedy: what takes most along goes first.
    """
    left = {feature: set(hidden) - _enabled(mcpu, triple, [f"-{feature}"]) for feature in hidden}
    roots, missing = [], set(hidden)
    for feature in sorted(hidden, key=lambda f: (-len(left[f]), f)):
        if feature in missing:
            roots.append(feature)
            missing -= left[feature] | {feature}
    return tuple(sorted(roots))


def host_flags() -> frozenset[str] | None:
    """The features that the kernel lists for this machine's CPU and lets this process use; None where it lists none."""
    flags = _listed_flags()
    return None if flags is None else _without_denied(flags)


def usable_flags() -> frozenset[str] | None:
    """:func:`host_flags`; where the kernel lists none, the flags of what the CPU answers for. None where neither says
    anything."""
    if (listed := host_flags()) is not None or not (answers := detected_features()):
        return listed
    flags = FLAGS.get(platform.machine(), {})
    return _without_denied(frozenset(flags[name] for name, there in answers.items() if there and name in flags))


def _without_denied(flags: frozenset[str]) -> frozenset[str]:
    return flags - _tiles_of(flags) if _tiles_of(flags) and not tiles_granted() else flags


def _listed_flags() -> frozenset[str] | None:
    return next((frozenset(value.split()) for key, value in _cpuinfo() if key in ("flags", "Features")), None)


def _tiles_of(flags: frozenset[str]) -> frozenset[str]:
    return frozenset(flag for flag in flags if flag.startswith("amx_"))


@lru_cache(maxsize=1)
def tiles_granted() -> bool:
    """Ask the kernel, once, to let this process and its threads use the tiles of AMX; whether it does.

    Without that the first instruction on them ends the process (Linux, Documentation/arch/x86/xstate.rst). Children
    that are forked may use them too, those that are executed must ask anew.
    """
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        return False
    ask = ctypes.CDLL(None, use_errno=True).syscall
    ask.restype, ask.argtypes = ctypes.c_long, [ctypes.c_long] * 3
    return bool(ask(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA) == 0)


def tiles_denied() -> bool:
    """Whether the CPU has AMX tiles that the kernel does not let this process use."""
    return bool(_tiles_of(_listed_flags() or frozenset())) and not tiles_granted()


def arm_core() -> str:
    """LLVM's name of the 64-bit Arm core that runs this, of the most powerful where there are several kinds; empty for
    what is none of Arm's own. Asks the kernel alone: LLVM is not there on a device that only measures."""
    fields = {key: value for key, value in _cpuinfo() if key in ("CPU implementer", "CPU part")}
    parts = [value for key, value in _cpuinfo() if key == "CPU part"]
    try:
        if int(fields.get("CPU implementer", "0"), 0) != _ARM_LIMITED:
            return ""
        return _ARM_PARTS.get(max(int(part, 0) for part in parts), "")
    except ValueError:
        return ""


def cpu_model() -> str:
    """The CPU's own name for itself, without trade marks: ``AMD EPYC 7B13``.

    A virtual machine may keep the number back, so that two generations bear one name; CPUID's family and model, which
    it has to tell, are then added: ``AMD EPYC (family 25, model 17)``.
    """
    fields: dict[str, str] = {}
    for key, value in _cpuinfo():
        fields.setdefault(key, value)
    given = fields.get("model name", "")
    name = " ".join((given or arm_core() or platform.processor() or platform.machine())
                    .replace("(R)", " ").replace("(TM)", " ").split())
    family, model = fields.get("cpu family"), fields.get("model")
    if given and family and model and not re.search(r"\d", name):
        name += f" (family {family}, model {model})"
    return name or "unknown CPU"


def machine_id() -> str:
    """The machine's description in records: ``AMD EPYC 7B13, 2 cores``."""
    cores = physical_cores()
    return f"{cpu_model()}, {cores} core{'s' if cores != 1 else ''}"


def _cpuinfo() -> Iterator[tuple[str, str]]:
    """The entries of /proc/cpuinfo, or of the file that stands for it; nothing where there is none."""
    try:
        text = Path(get("MLC_CPUINFO")).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        key, _, value = line.partition(":")
        yield key.strip(), value.strip()
