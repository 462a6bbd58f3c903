"""What the CUDA compiler made of a kernel: registers, spills, memory, and the instructions in the machine code.

``nvcc`` says the former of itself; the latter need ``nvdisasm``, which comes with the CUDA toolkit and from PyPI as
``nvidia-cuda-nvdisasm``.
"""

from __future__ import annotations

import re
import shutil
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mlc.codegen.cuda import find_nvcc, options, run_tool

__all__ = ["Kernel", "find_nvdisasm", "kernels"]

_PROPERTIES = re.compile(
    r"Function properties for (\w+)\s+(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\s+"
    r"(?:ptxas info\s*: )?Used (\d+) registers(.*)"
)
_SHARED = re.compile(r"(\d+) bytes smem")
_SECTION = re.compile(r"^\.text\.(\w+):", re.MULTILINE)
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)


@dataclass(frozen=True)
class Kernel:
    """One kernel for one architecture. ``shared_bytes`` are those known at compile time; ``stack_bytes`` hold arrays
    that are no registers, ``spilled_bytes`` registers that found no room. ``instructions`` counts the machine code's
    opcodes (``HMMA.16816.F32``), empty without a disassembler."""

    name: str
    arch: str
    registers: int
    stack_bytes: int
    spilled_bytes: int
    shared_bytes: int
    instructions: Counter[str] = field(default_factory=Counter)

    def count(self, opcode: str) -> int:
        """Instructions whose opcode is this, or begins with it and a dot."""
        return sum(n for name, n in self.instructions.items() if name == opcode or name.startswith(f"{opcode}."))


def find_nvdisasm() -> str | None:
    """The disassembler: from PyPI's package, beside nvcc, or on the path; None without one."""
    packaged = Path(sysconfig.get_path("purelib"), "nvidia")
    beside = Path(find_nvcc()).resolve().parent
    candidates = [*sorted(packaged.glob("*/bin/nvdisasm")), beside / "nvdisasm"]
    return next((str(path) for path in candidates if path.is_file()), shutil.which("nvdisasm"))


def kernels(source: str, arch: str) -> list[Kernel]:
    """What the compiler makes of each kernel in a source, by the options that everything is built with.

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
    return [
        Kernel(name, arch, int(registers), int(stack), int(stored) + int(loaded), _shared(rest),
               instructions.get(name, Counter()))
        for name, stack, stored, loaded, registers, rest in _PROPERTIES.findall(said)
    ]


def _shared(text: str) -> int:
    found = _SHARED.search(text)
    return int(found[1]) if found else 0


def _instructions(code: str) -> Iterator[tuple[str, Counter[str]]]:
    sections = list(_SECTION.finditer(code))
    for section, following in zip(sections, [*sections[1:], None], strict=True):
        body = code[section.end() : following.start() if following else len(code)]
        yield section[1], Counter(_INSTRUCTION.findall(body))
