"""A CPU that hides features: what libraries that ask CPUID see of it, and what this compiler sees."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.performance.hidden_cpu import FEATURES, GROUPS, environment, expand, main, replace_cpuid, without

ASKS = r"""
#include <cpuid.h>
unsigned asked(unsigned leaf, unsigned subleaf, int reg) {
    unsigned v[4];
    __cpuid_count(leaf, subleaf, v[0], v[1], v[2], v[3]);
    return v[reg];
}
unsigned looks_like_cpuid(void) { return 0x90a20f90u; }
void illegal(void) { __asm__ volatile("ud2"); }
"""

needs_tools = pytest.mark.skipif(
    platform.machine() != "x86_64" or sys.platform != "linux" or not (shutil.which("cc") and shutil.which("objdump")),
    reason="needs Linux on x86-64, cc and objdump",
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("asks")
    (folder / "asks.c").write_text(ASKS)
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", folder / "asks.so", folder / "asks.c"], check=True)
    assert replace_cpuid(folder / "asks.so") >= 1
    assert replace_cpuid(folder / "asks.so") == 0
    return folder / "asks.so"


def run(library: Path, code: str, features: list[str]) -> subprocess.CompletedProcess[str]:
    code = f"import ctypes; lib = ctypes.CDLL({str(library)!r}); lib.asked.restype = ctypes.c_uint; {code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False,
                          env={**os.environ, **environment(features, library.parent)})


@needs_tools
def test_a_library_sees_all_but_what_is_hidden(library: Path) -> None:
    ask = "print(*(lib.asked(leaf, sub, reg) for leaf in (1, 7) for sub in (0, 1) for reg in range(4)))"
    everything = [int(word) for word in run(library, ask, []).stdout.split()]
    assert everything[2] & 1 << 28, "the tests need AVX"
    fewer = [int(word) for word in run(library, ask, ["avx", "fma", "avx2", "avx512f"]).stdout.split()]
    # the first leaf's second register holds the core that asked
    assert fewer[2] == fewer[6] == everything[2] & ~(1 << 28 | 1 << 12)
    assert fewer[9] == everything[9] & ~(1 << 5 | 1 << 16)
    assert [fewer[at] for at in (0, 3, 8, 10, 11)] == [everything[at] for at in (0, 3, 8, 10, 11)]


@needs_tools
def test_other_bytes_and_other_illegal_instructions_stay(library: Path) -> None:
    assert run(library, "print(lib.looks_like_cpuid() & 0xffffffff)", []).stdout.split() == [str(0x90A20F90)]
    assert run(library, "lib.illegal()", []).returncode == -signal.SIGILL


@needs_tools
def test_this_compiler_reads_the_same_cpu(library: Path) -> None:
    names = expand(["avx512", "fma"])
    described = Path(environment(names, library.parent)["MLC_CPUINFO"]).read_text()
    flags = {flag for line in described.splitlines() if line.startswith("flags") for flag in line.split()}
    assert "avx" in flags and not flags & set(names)


def test_flags_are_taken_whole() -> None:
    assert without(["avx512f", "avx"], "flags\t: avx avx2 avx512f avx512fp16 fma\n") == "flags\t: avx2 avx512fp16 fma\n"


def test_groups_are_of_known_features(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(FEATURES) >= {name for names in GROUPS.values() for name in names}
    assert expand(["vnni", "fma"]) == [*GROUPS["vnni"], "fma"]
    with pytest.raises(SystemExit, match="2"):
        main(["--hide", "avx3", "--", "true"])
    assert "a hidden feature must be one of" in capsys.readouterr().err
