"""What a call of a compiled model costs beside its arithmetic: microseconds, for programs that compute next to nothing.

    python -m tests.performance.bench_call_overhead [--repeats N]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from mlc.artifact import Executable, compile_module
from mlc.target import resolve
from mlc.testing.programs import dense, twins


def _median_us(call: Callable[[], object], repeats: int) -> float:
    for _ in range(repeats // 10 + 1):
        call()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return float(np.median(times)) * 1e6


def _aligned(shape: tuple[int, ...]) -> np.ndarray:
    """A float32 array at a multiple of 64 bytes, which compiled code reads in place."""
    count = int(np.prod(shape))
    memory = np.zeros(count * 4 + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + count * 4].view(np.float32).reshape(shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="native", help="a CPU target that this machine can run")
    parser.add_argument("--repeats", type=int, default=5000)
    args = parser.parse_args()
    target = resolve(args.target, threads=1)
    for name, case in (("two functions, 2 weights", dense()), ("one function called twice", twins())):
        print(f"{name}: {_costs(compile_module(case.mod, target), args.repeats)}")


def _costs(exe: Executable, repeats: int) -> str:
    shape = exe.inputs[0].shape
    shared, unaligned = _aligned(shape), _aligned((shape[0] * shape[1] + 1,))[1:].reshape(shape)
    inside = float(np.median(exe.time(shared, repeats=repeats))) * 1e6
    outputs = exe.empty_outputs()
    return (f"compiled code {inside:.1f} us; call {_median_us(lambda: exe(shared), repeats):.1f} us, "
            f"with a copied input {_median_us(lambda: exe(unaligned), repeats):.1f} us, "
            f"into given outputs {_median_us(lambda: exe.run([shared], outputs), repeats):.1f} us")


if __name__ == "__main__":
    main()
