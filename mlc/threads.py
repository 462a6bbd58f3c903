"""How many threads compiled code runs on, in every process that runs any.

TVM's pool takes half of the visible cores on x86, since it assumes hyper-threads, and pins its threads. Threads that
other libraries start afterwards (OpenBLAS under numpy) inherit the main thread's mask and then share its core: the
same GEMM ran at half its speed after one ``numpy.matmul``. Both are settled by the environment, which the pool reads
when the first parallel loop runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache

from mlc.config import physical_cores

__all__ = ["configure", "environment"]


def environment(threads: int) -> Mapping[str, str]:
    """The variables that make a fresh process run compiled code on ``threads`` threads."""
    return {"TVM_NUM_THREADS": str(threads), "TVM_BIND_THREADS": "0"}


def configure(threads: int) -> None:
    """Run compiled code that this Python thread calls on ``threads`` threads; 0.3 us where nothing changes.

    Each calling thread has a pool of its own. It is made for all physical cores (or for ``threads``, if more) when
    the process first gets here, and TVM cannot grow it later; ``TVM_NUM_THREADS`` in the environment goes before.
    """
    configure_pool, running = _pool(threads)
    if running() != _reached.get(threads):
        configure_pool(1, threads)
        _reached[threads] = running()


_reached: dict[int, int] = {}  # threads asked for -> threads that the pool gave, which may be fewer


@cache
def _functions() -> tuple[Callable[[int, int], None], Callable[[], int]]:
    import tvm_ffi

    if tvm_ffi.get_global_func("runtime.NumThreads", allow_missing=True) is None:
        import tvm  # noqa: F401  (loads the library that has it)
    return tvm_ffi.get_global_func("runtime.config_threadpool"), tvm_ffi.get_global_func("runtime.NumThreads")


def _pool(threads: int) -> tuple[Callable[[int, int], None], Callable[[], int]]:
    if not _reached:
        for name, value in environment(max(threads, physical_cores())).items():
            os.environ.setdefault(name, value)
    return _functions()
