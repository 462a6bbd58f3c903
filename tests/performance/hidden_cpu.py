"""A command on a CPU that hides features, for this compiler and for its peers alike.

    python -m tests.performance.hidden_cpu [--hide avx512] -- python -m tests.performance.table --seconds 0

A virtual machine may hide AVX-512 of a CPU that has it. mlc reads the features from ``/proc/cpuinfo``, for which a file
can stand; its peers ask the CPUID instruction, which nothing in user space can change. So the peers' packages are
copied into ``build/hidden-cpu/``, each CPUID instruction of their libraries is replaced by UD0, an illegal instruction
of the same two bytes, and a preloaded library answers it with the bits cleared (``hidden_cpu.c``). Nothing else of
their code changes, and CPUID is asked when they are loaded: their kernels run at full speed. LLVM asks CPUID for the
CPU's name: to hide that, TVM is copied too.

Needs x86, ``cc`` and ``objdump``. The command's exit code is returned. Under pytest give ``-p no:faulthandler``, whose
handler would take the signal of the illegal instructions.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import mmap
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PEERS = ("onnxruntime", "openvino")
CPUID, UD0 = b"\x0f\xa2", b"\x0f\xff"

#: where CPUID tells a feature, by its name in /proc/cpuinfo: leaf, subleaf, register, bit (Intel's manual, volume 2A,
#: table 3-17)
FEATURES = {
    "abm": (0x80000001, 0, "c", 5), "bmi1": (7, 0, "b", 3), "bmi2": (7, 0, "b", 8),
    "vaes": (7, 0, "c", 9), "vpclmulqdq": (7, 0, "c", 10),
    "fma": (1, 0, "c", 12), "f16c": (1, 0, "c", 29), "avx": (1, 0, "c", 28), "avx2": (7, 0, "b", 5),
    "avx512f": (7, 0, "b", 16), "avx512dq": (7, 0, "b", 17), "avx512ifma": (7, 0, "b", 21), "avx512cd": (7, 0, "b", 28),
    "avx512bw": (7, 0, "b", 30), "avx512vl": (7, 0, "b", 31), "avx512vbmi": (7, 0, "c", 1),
    "avx512_vbmi2": (7, 0, "c", 6), "avx512_vnni": (7, 0, "c", 11), "avx512_bitalg": (7, 0, "c", 12),
    "avx512_vpopcntdq": (7, 0, "c", 14), "avx512_vp2intersect": (7, 0, "d", 8), "amx_bf16": (7, 0, "d", 22),
    "avx512_fp16": (7, 0, "d", 23), "amx_tile": (7, 0, "d", 24), "amx_int8": (7, 0, "d", 25),
    "avx_vnni": (7, 1, "a", 4), "avx512_bf16": (7, 1, "a", 5),
    # the family, base and extended: with none of its bits the CPU has no name
    **{f"family_{bit}": (1, 0, "a", bit) for bit in (*range(8, 12), *range(20, 28))},
}
#: names for what machines hide together
GROUPS = {
    "avx512": [name for name in FEATURES if name.startswith(("avx512", "amx"))],
    "vnni": ["avx512_vnni", "avx_vnni", "avx512_bf16", *(name for name in FEATURES if name.startswith("amx"))],
    "name": [name for name in FEATURES if name.startswith("family_")],
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; what must be copied for it is copied once."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hide", default="avx512", help=f"features of /proc/cpuinfo, or {', '.join(GROUPS)}: "
                                                         "comma-separated (default: avx512)")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "hidden-cpu", help="where the copies are kept")
    parser.add_argument("command", nargs="+", help="what to run, after --")
    args = parser.parse_args(argv)
    try:
        names = expand(args.hide.split(","))
    except ValueError as error:
        parser.error(str(error))
    for package in PEERS:
        copy_package(package, args.folder / "site")
    if set(GROUPS["name"]) & set(names):
        copy_package("tvm", args.folder / "site")
    return subprocess.run(args.command, env={**os.environ, **environment(names, args.folder)}, check=False).returncode


def expand(names: Iterable[str]) -> list[str]:
    """Features that ``names`` mean, groups expanded. Raises ``ValueError`` for what is neither."""
    features = [feature for name in names for feature in GROUPS.get(name, [name])]
    for name in features:
        if name not in FEATURES:
            raise ValueError(f"a hidden feature must be one of {', '.join([*GROUPS, *FEATURES])}, got {name!r}")
    return features


def environment(features: Sequence[str], folder: Path) -> dict[str, str]:
    """Variables for processes that are to see a CPU without ``features``; copied packages of ``folder`` come first."""
    masks: dict[tuple[int, int, str], int] = defaultdict(int)
    for leaf, subleaf, register, bit in (FEATURES[name] for name in features):
        masks[leaf, subleaf, register] |= 1 << bit
    folder.mkdir(parents=True, exist_ok=True)
    described = folder / f"cpuinfo-{hashlib.sha256(' '.join(features).encode()).hexdigest()[:8]}"
    described.write_text(without(features, Path("/proc/cpuinfo").read_text(encoding="utf-8")), encoding="utf-8")
    levels = ",".join(f"-{name.replace('_', '-').upper()}" for name in features if name.startswith("avx"))
    return {
        "HIDDEN_CPUID": ",".join(f"{leaf:x}.{subleaf:x}.{register}={mask:x}"
                                 for (leaf, subleaf, register), mask in sorted(masks.items())),
        "MLC_CPUINFO": str(described.resolve()),
        "LD_PRELOAD": str(answering_library(folder).resolve()),
        "GLIBC_TUNABLES": f"glibc.cpu.hwcaps={levels}",
        "PYTHONPATH": os.pathsep.join(filter(None, [str((folder / "site").resolve()), os.environ.get("PYTHONPATH")])),
    }


def without(features: Iterable[str], cpuinfo: str) -> str:
    """The text of /proc/cpuinfo without those flags."""
    names = "|".join(sorted(map(re.escape, features), key=len, reverse=True))
    return re.sub(rf" (?:{names})(?=\s)", "", cpuinfo)


def answering_library(folder: Path) -> Path:
    """``hidden_cpu.c``, compiled into ``folder``."""
    source, library = Path(__file__).with_suffix(".c"), folder / "hidden_cpu.so"
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        subprocess.run(["cc", "-O2", "-Wall", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return library


def copy_package(name: str, site: Path) -> None:
    """The installed package ``name``, copied into ``site`` with CPUID replaced; nothing where that was done before."""
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise SystemExit(f"{name} must be installed; run `pip install mlc[bench]`")
    source, target = Path(found.origin).parent, site / name
    if target.exists():
        return
    partial = site / f"{name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial, symlinks=True)
    libraries = [path for path in partial.rglob("*.so*") if not path.is_symlink()]
    with ThreadPoolExecutor() as pool:
        replaced = sum(pool.map(replace_cpuid, libraries))
    print(f"{name}: {replaced} CPUID instructions of {len(libraries)} libraries", file=sys.stderr)
    partial.rename(target)


def replace_cpuid(library: Path) -> int:
    """Replace each CPUID instruction of an ELF library by UD0, in place; how many there were."""
    with library.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        if data.find(CPUID) < 0:
            return 0
        offsets = list(_cpuid_offsets(library))
        for offset in offsets:
            if data[offset:offset + 2] != CPUID:
                raise SystemExit(f"{library}: objdump shows CPUID at {offset:#x}, where the file has other bytes")
            data[offset:offset + 2] = UD0
    return len(offsets)


def _cpuid_offsets(library: Path) -> Iterator[int]:
    """File offsets of the CPUID instructions: bytes that look like one within another instruction are not among
    them."""
    disassembly = subprocess.Popen(
        ["objdump", "--disassemble", "--no-show-raw-insn", "--file-offsets", "--section-headers", str(library)],
        stdout=subprocess.PIPE, text=True,
    )
    assert disassembly.stdout is not None
    shift: dict[str, int] = {}
    section = ""
    for line in disassembly.stdout:
        if header := re.match(r"\s*\d+ (\S+)\s+[0-9a-f]+\s+([0-9a-f]+)\s+[0-9a-f]+\s+([0-9a-f]+)\s", line):
            shift[header[1]] = int(header[3], 16) - int(header[2], 16)
        elif line.startswith("Disassembly of section "):
            section = line.split()[-1].rstrip(":")
        elif line.rstrip().endswith("\tcpuid"):
            yield int(line.split(":")[0], 16) + shift[section]
    if disassembly.wait() != 0:
        raise SystemExit(f"objdump must read {library}, got exit code {disassembly.returncode}")


if __name__ == "__main__":
    sys.exit(main())
