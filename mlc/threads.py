"""How many threads compiled code runs on, in every process that runs any.

TVM's pool takes half of the visible cores on x86, since it assumes hyper-threads, and pins its threads. Threads that
other libraries start afterwards (OpenBLAS under numpy) inherit the main thread's mask and then share its core: the
same GEMM ran at half its speed after one ``numpy.matmul``. Both are settled by the environment, which the pool reads
when the first parallel loop runs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["configure", "environment"]


def environment(threads: int) -> Mapping[str, str]:
    """The variables that make a fresh process run compiled code on ``threads`` threads."""
    return {"TVM_NUM_THREADS": str(threads), "TVM_BIND_THREADS": "0"}


def configure(threads: int) -> None:
    """Run compiled code on ``threads`` threads in this process; the first call decides the pool's size.

    A later call can lower the number, never raise it above the first (TVM cannot grow its pool).
    """
    for name, value in environment(threads).items():
        os.environ.setdefault(name, value)
    import tvm

    tvm.get_global_func("runtime.config_threadpool")(1, threads)
