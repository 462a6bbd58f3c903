"""What the CUDA compiler made of a kernel: registers, spills, shared memory, and instruction counts.

``nvcc`` says the former of itself; the latter need ``nvdisasm``, which comes with the CUDA toolkit and from PyPI as
``nvidia-cuda-nvdisasm``.
"""

from __future__ import annotations

import json
import re
import shutil
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import tvm
from tvm.ir.instrument import pass_instrument

from mlc.codegen.cuda import find_nvcc, has_nvcc, options, run_tool
from schedules.cuda.lowering import LAST_PASS, dynamic_shared
from schedules.machine import gpu_of

__all__ = ["DynamicShared", "Kernel", "dumped", "find_nvdisasm", "kernels", "write_dump"]

_SOURCE, _DYNAMIC = "kernels.cu", "kernels.json"
_THREADS = re.compile(r"__launch_bounds__\((\d+)(?:, \d+)?\) (\w+)\(")

_PROPERTIES = re.compile(
    r"Function properties for (\w+)\s+(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\s+"
    r"(?:ptxas info\s*: )?Used (\d+) registers(.*)"
)
_SERIALISED = re.compile(r"wgmma\.mma_async instructions are serialized.*? function '(\w+)'")
_SHARED = re.compile(r"(\d+) bytes smem")
_SECTION = re.compile(r"^\.text\.(\w+):", re.MULTILINE)
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)


@dataclass(frozen=True)
class Kernel:
    """One kernel for one architecture. ``blocks`` of so many ``threads`` run on a multiprocessor at once;
    ``stack_bytes`` hold arrays that are no registers, ``spilled_bytes`` registers that found no room. ``instructions``
    counts the machine code's opcodes (``HMMA.16816.F32``), empty without a disassembler; ``serialised`` says that the
    compiler waits for each product of a warpgroup."""

    name: str
    arch: str
    threads: int
    blocks: int
    registers: int
    stack_bytes: int
    spilled_bytes: int
    shared_bytes: int
    instructions: Counter[str] = field(default_factory=Counter)
    serialised: bool = False

    def count(self, opcode: str) -> int:
        """Instructions whose opcode is this, or begins with it and a dot."""
        return sum(n for name, n in self.instructions.items() if name == opcode or name.startswith(f"{opcode}."))

    def to_json(self) -> dict[str, Any]:
        """JSON values; of the instructions those that move data ahead, multiply on tensor cores, or spill."""
        return {**asdict(self), "instructions": {opcode: n for opcode in _TOLD if (n := self.count(opcode))}}


#: opcodes that a report counts: products on tensor cores, asynchronous copies, fragments, plain multiply-adds, memory
_TOLD = ("HMMA", "HGMMA", "IMMA", "LDGSTS", "UTMALDG", "LDSM", "FFMA", "LDG", "STG", "LDS", "STS", "BAR", "LDL", "STL")


@pass_instrument
class DynamicShared:
    """Notes how much dynamic shared memory each kernel asks for, in bytes."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}

    def run_after_pass(self, mod: tvm.IRModule, info: Any) -> None:
        if info.name != LAST_PASS:
            return
        for var, func in mod.functions.items():
            if size := dynamic_shared(func):
                self.bytes[str(var.name_hint)] = size


def write_dump(folder: Path, source: str, dynamic: Mapping[str, int]) -> None:
    """Keep a source and its kernels' dynamic shared memory for :func:`dumped`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _SOURCE).write_text(source, encoding="utf-8")
    (folder / _DYNAMIC).write_text(json.dumps(dict(dynamic)), encoding="utf-8")


def dumped(folder: Path, arch: str) -> list[Kernel]:
    """The kernels of the source that was kept in a folder; none where there is no such file, or no nvcc."""
    if not (folder / _SOURCE).is_file() or not has_nvcc():
        return []
    source = (folder / _SOURCE).read_text(encoding="utf-8")
    return kernels(source, arch, json.loads((folder / _DYNAMIC).read_text(encoding="utf-8")))


def find_nvdisasm() -> str | None:
    """The disassembler: from PyPI's package, beside nvcc, or on the path; None without one."""
    packaged = Path(sysconfig.get_path("purelib"), "nvidia")
    beside = Path(find_nvcc()).resolve().parent
    candidates = [*sorted(packaged.glob("*/bin/nvdisasm")), beside / "nvdisasm"]
    return next((str(path) for path in candidates if path.is_file()), shutil.which("nvdisasm"))


def kernels(source: str, arch: str, dynamic: Mapping[str, int] | None = None) -> list[Kernel]:
    """What the compiler makes of each kernel in a source, by the options that everything is built with; ``dynamic`` is
    the shared memory in bytes that kernels ask for when they are launched.

    Raises :class:`mlc.errors.BuildError` as :func:`mlc.codegen.cuda.nvcc` does.
    """
    with tempfile.TemporaryDirectory(prefix="mlc-inspect-") as folder:
        text, binary = Path(folder, "kernels.cu"), Path(folder, "kernels.cubin")
        text.write_text(source, encoding="utf-8")
        command = [find_nvcc(), "--cubin", f"-arch={arch}", *options(), "-Xptxas", "-v", "-o", str(binary), str(text)]
        said = run_tool(command, f"CUDA source must compile for {arch}")
        disassembler = find_nvdisasm()
        code = run_tool([disassembler, str(binary)], "machine code must be readable") if disassembler else ""
    instructions = dict(_instructions(code))
    threads = {name: int(count) for count, name in _THREADS.findall(source)}
    serialised = set(_SERIALISED.findall(said))
    return [
        _kernel(name, arch, threads[name], int(registers), (dynamic or {}).get(name, 0) + _shared(rest), int(stack),
                int(stored) + int(loaded), instructions.get(name, Counter()), name in serialised)
        for name, stack, stored, loaded, registers, rest in _PROPERTIES.findall(said)
    ]


def _kernel(
    name: str, arch: str, threads: int, registers: int, shared: int, stack: int, spilled: int,
    instructions: Counter[str], serialised: bool,
) -> Kernel:
    gpu = gpu_of(arch)
    blocks = gpu.resident(threads, registers, shared) if gpu else 0
    return Kernel(name, arch, threads, blocks, registers, stack, spilled, shared, instructions, serialised)


def _shared(text: str) -> int:
    found = _SHARED.search(text)
    return int(found[1]) if found else 0


def _instructions(code: str) -> Iterator[tuple[str, Counter[str]]]:
    sections = list(_SECTION.finditer(code))
    for section, following in zip_longest(sections, sections[1:]):
        body = code[section.end() : following.start() if following else len(code)]
        yield section[1], Counter(_INSTRUCTION.findall(body))
