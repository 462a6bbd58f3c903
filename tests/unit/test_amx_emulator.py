"""The emulator of AMX: instructions that the assembler has encoded, compared with what Intel's manual says of them. A
CPU that has AMX executes them itself, which compares what is expected here with a second source."""

from __future__ import annotations

import ctypes
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from mlc.cpu import host_cpu
from mlc.testing import amx

pytestmark = pytest.mark.skipif(bool(amx.missing()), reason=f"{amx.missing()} must be there")

#: by name: instructions of a function whose arguments lie in rdi, rsi, rdx, rcx, r8, r9
PROGRAMS = {
    "configure": "ldtilecfg (%rdi)",
    "stored": "sttilecfg (%rdi)",
    "release": "tilerelease",
    # memory operands of every form: indices, scales, displacements of 8 and 32 bits, extended registers
    "load0": "tileloadd (%rdi,%rsi), %tmm0",
    "load1": "mov %rdi, %r12; lea -64(%r12), %r12; tileloadd 64(%r12,%rsi), %tmm1",
    "load2": "mov %rdi, %r13; mov %rsi, %r9; shr $1, %r9; tileloaddt1 (%r13,%r9,2), %tmm2",
    "load3": "sub $4096, %rdi; mov %rsi, %rax; shr $3, %rax; tileloadd 4096(%rdi,%rax,8), %tmm3",
    "store0": "tilestored %tmm0, (%rdi,%rsi)",
    "store1": "mov %rdi, %rbp; tilestored %tmm1, (%rbp,%rsi)",
    "zero0": "tilezero %tmm0",
    "ss": "tdpbssd %tmm2, %tmm1, %tmm0",
    "su": "tdpbsud %tmm2, %tmm1, %tmm0",
    "us": "tdpbusd %tmm2, %tmm1, %tmm0",
    "uu": "tdpbuud %tmm2, %tmm1, %tmm0",
    "bfloats": "tdpbf16ps %tmm2, %tmm1, %tmm0",
    "twice": ".byte 0xc4, 0xe2, 0x71, 0x5e, 0xc1",  # tdpbusd %tmm1, %tmm1, %tmm0, which the assembler refuses
    "relative": "ldtilecfg plain(%rip)",
    "other": "ud2",
}
_SAVED = ("rbx", "rbp", "r12", "r13")


def source() -> str:
    pushes = "; ".join(f"push %{r}" for r in _SAVED)
    pops = "; ".join(f"pop %{r}" for r in reversed(_SAVED))
    functions = [f".globl {name}\n{name}: {pushes}; {body}; {pops}; ret" for name, body in PROGRAMS.items()]
    data = ", ".join(map(str, configuration({0: (3, 8)})))
    return "\n".join([".text", *functions, ".data", ".balign 64", f"plain: .byte {data}", ""])


def configuration(shapes: dict[int, tuple[int, int]], palette: int = 1, start: int = 0) -> bytes:
    """``{tile: (rows, bytes of a row)}`` as LDTILECFG reads it."""
    data = np.zeros(64, np.uint8)
    data[:2] = palette, start
    for tile, (rows, width) in shapes.items():
        data[48 + tile], data[16 + 2 * tile], data[17 + 2 * tile] = rows, width % 256, width // 256
    return data.tobytes()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("amx")
    (folder / "programs.s").write_text(source())
    command = ["cc", "-shared", "-o", str(folder / "programs.so"), str(folder / "programs.s")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "no such instruction" in done.stderr:
        pytest.skip("the assembler must know AMX")
    assert not done.returncode, done.stderr
    return folder / "programs.so"


@pytest.fixture
def run(built: Path) -> Iterator[Callable[..., None]]:
    """Call a program on arrays, whose rows' distance follows them."""
    amx.install()
    library = ctypes.CDLL(str(built))

    def call(name: str, array: np.ndarray | bytes | None = None) -> None:
        given = np.frombuffer(array, np.uint8) if isinstance(array, bytes) else array
        arguments = [] if given is None else [ctypes.c_void_p(given.ctypes.data), ctypes.c_long(given.strides[0])]
        getattr(library, name)(*arguments)

    yield call
    call("release")


def _load(run: Callable[..., None], c: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
    shapes = {i: (len(each), each.shape[1] * each.itemsize) for i, each in enumerate((c, a, b))}
    run("configure", configuration(shapes))
    for i, each in enumerate((c, a, b)):
        run(f"load{i}", each)


def _padded(array: np.ndarray) -> np.ndarray:
    """The same elements, whose rows lie further apart, and not at whole words."""
    whole = np.full((array.shape[0], array.shape[1] + 24 // array.itemsize), 77, array.dtype)
    whole[:, : array.shape[1]] = array
    return whole[:, : array.shape[1]]


def _ends(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    return np.where(rng.random(shape) < 1 / 3, rng.choice([low, high], shape), rng.integers(low, high + 1, shape)
                    ).astype(dtype)


@pytest.mark.parametrize("name", ["ss", "su", "us", "uu"])
@pytest.mark.parametrize("sizes", [(16, 16, 16), (5, 3, 7), (1, 16, 2), (16, 1, 1)])
def test_products_of_bytes(run: Callable[..., None], name: str, sizes: tuple[int, int, int]) -> None:
    (m, n, k), rng = sizes, np.random.default_rng(sizes)
    a = _padded(_ends(rng, (m, 4 * k), "int8" if name[0] == "s" else "uint8"))
    b = _padded(_ends(rng, (k, 4 * n), "int8" if name[1] == "s" else "uint8"))
    c, out = _padded(_ends(rng, (m, n), "int32")), _padded(np.zeros((16, 16), "int32"))
    _load(run, c, a, b)
    run(name)
    run("store0", out)
    columns = b.astype("int64").reshape(k, n, 4).transpose(0, 2, 1).reshape(4 * k, n)
    expected = (c + a.astype("int64") @ columns).astype("int32")  # sums wrap
    np.testing.assert_array_equal(out[:m, :n], expected)
    assert not out[m:].any()
    assert not out[:m, n:].any()


def test_products_of_bfloat16(run: Callable[..., None]) -> None:
    """Even and odd products are added up apart, each fused; subnormal operands and results are zero."""
    rng, (m, n, k) = np.random.default_rng(3), (9, 16, 13)
    a, b = (rng.standard_normal(s).astype(ml_dtypes.bfloat16) for s in ((m, 2 * k), (k, 2 * n)))
    a[0, 0], b[0, 0] = 1e-39, 1e37
    c, out = rng.standard_normal((m, n)).astype("float32"), np.zeros((m, n), "float32")
    c[1, 1] = 1e-40
    a[1], b[:, 2:4] = 0, 0
    _load(run, c, a, b)
    run("bfloats")
    run("store0", out)
    wide = a.astype("float64").reshape(m, k, 2), b.astype("float64").reshape(k, n, 2)
    wide[0][0, 0, 0] = 0
    halves = []
    for part in range(2):
        total = np.zeros((m, n), "float32")
        for step in range(k):  # a product of two bfloat16 and its sum with a float32 are rounded once
            total = (total + np.multiply.outer(wide[0][:, step, part], wide[1][step, :, part])).astype("float32")
        halves.append(total)
    flushed = np.where(np.abs(c) < 1.2e-38, np.float32(0), c)
    np.testing.assert_array_equal(out, flushed + (halves[0] + halves[1]))


def test_configuration(run: Callable[..., None]) -> None:
    found = np.full(64, 9, np.uint8)
    run("stored", found)
    assert not found.any(), "nothing is configured at first"
    wanted = configuration({0: (16, 64), 1: (2, 12), 7: (1, 1)}, start=1)
    run("configure", wanted)
    run("stored", found)
    assert found.tobytes() == wanted
    rows = np.arange(1, 2 * 12 + 1, dtype=np.uint8).reshape(2, 12)
    run("load1", rows)  # from the row at which an interrupted load goes on
    run("stored", found)
    assert found[1] == 0
    out = np.full((2, 12), 5, np.uint8)
    run("store1", out)
    np.testing.assert_array_equal(out, [[0] * 12, rows[1]])
    run("zero0")
    run("relative")
    run("stored", found)
    assert found.tobytes() == configuration({0: (3, 8)})
    run("release")
    run("stored", found)
    assert not found.any()
    run("configure", configuration({}, palette=0))


def test_loads_and_stores_move_what_is_configured(run: Callable[..., None]) -> None:
    rng = np.random.default_rng(0)
    run("configure", configuration({0: (7, 20), 1: (7, 20), 2: (16, 64), 3: (2, 64)}))
    rows = _padded(_ends(rng, (7, 20), "uint8"))
    run("load0", rows)
    run("load3", _padded(_ends(rng, (2, 64), "uint8")))
    out = np.full((8, 24), 200, np.uint8)
    run("store0", out)
    np.testing.assert_array_equal(out[:7, :20], rows)
    assert (out[7:] == 200).all()
    assert (out[:, 20:] == 200).all()
    run("zero0")
    run("store0", out)
    assert not out[:7, :20].any()


@pytest.mark.skipif(host_cpu().shows("amx-tile"), reason="what a CPU executes by itself is not counted")
def test_instructions_are_counted(run: Callable[..., None]) -> None:
    with amx.counted() as counts:
        run("configure", configuration({0: (1, 4)}))
        run("zero0")
        run("zero0")
    assert {name: count for name, count in counts.items() if count} == {"ldtilecfg": 1, "tilezero": 2}


_CHILD = """
import ctypes, sys
import numpy as np
from mlc.cpu import host_flags
from mlc.testing import amx
host_flags()  # asks the kernel for tiles where the CPU has them
amx.install()
library = ctypes.CDLL(sys.argv[1])
for step in sys.argv[2:]:
    name, _, data = step.partition("=")
    array = np.frombuffer(bytes.fromhex(data), np.uint8).copy() if data else np.zeros((16, 64), np.uint8)
    getattr(library, name)(ctypes.c_void_p(array.ctypes.data), ctypes.c_long(64))
"""
SMALL = {0: (2, 8), 1: (2, 12), 2: (3, 8)}
#: by what is said: the signal, and the steps
FAULTS: Mapping[str, tuple[int, Sequence[str | bytes]]] = {
    "without a configuration": (signal.SIGILL, ["zero0"]),
    "a product without a configuration": (signal.SIGILL, ["us"]),
    "not configured": (signal.SIGILL, [configuration({1: (2, 8)}), "zero0"]),
    "other rows": (signal.SIGILL, [configuration({**SMALL, 0: (3, 8)}), "us"]),
    "other columns": (signal.SIGILL, [configuration({**SMALL, 0: (2, 12)}), "us"]),
    "two depths": (signal.SIGILL, [configuration({**SMALL, 1: (2, 8)}), "us"]),
    "no whole words": (signal.SIGILL, [configuration({**SMALL, 0: (2, 6)}), "us"]),
    "not three": (signal.SIGILL, [configuration(SMALL), "twice"]),
    "neither 0 nor 1": (signal.SIGSEGV, [configuration(SMALL, palette=2)]),
    "more than 64 bytes": (signal.SIGSEGV, [configuration({0: (2, 65)})]),
    "more than 16 rows": (signal.SIGSEGV, [configuration({0: (17, 8)})]),
    "rows or columns alone": (signal.SIGSEGV, [configuration({0: (2, 0)})]),
    "bytes 2 to 15": (signal.SIGSEGV, [b"\1\0\1" + bytes(61)]),
    "bytes 32 to 47": (signal.SIGSEGV, [b"\1" + bytes(31) + b"\1" + bytes(31)]),
    "bytes 56 to 63": (signal.SIGSEGV, [b"\1" + bytes(62) + b"\1"]),
    "": (signal.SIGILL, ["other"]),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("said", FAULTS)
def test_what_the_manual_forbids_ends_the_process(built: Path, said: str) -> None:
    expected, steps = FAULTS[said]
    words = [f"configure={step.hex()}" if isinstance(step, bytes) else step for step in steps]
    done = subprocess.run([sys.executable, "-c", _CHILD, str(built), *words], capture_output=True, text=True,
                          check=False)
    assert done.returncode == -expected
    if not host_cpu().shows("amx-tile"):
        assert re.search(said, done.stderr)
        assert ("AMX emulator: #" in done.stderr) == bool(said)
