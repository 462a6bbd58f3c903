"""The number of threads of compiled code, for every process that runs any.

TVM's pool takes half of the visible cores on x86, since it assumes hyper-threads, and pins its threads. Threads that
other libraries start afterwards (OpenBLAS under numpy) inherit the main thread's mask and then share its core: the
same GEMM ran at half its speed after one ``numpy.matmul``. Both are settled by the environment, which the pool reads
when the first parallel loop runs.

TVM has a pool for every thread that calls compiled code. When such a thread ends, its pool's workers spin on for a
while, so a service with a thread a request drowns in them; and where such a thread forks, the child has a pool without
workers, for which a call, and even the end of the process, waits for ever. So :func:`call` runs a model in the main
thread, whose pool is made anew around a fork, or hands it to threads of this module: they are few, they are used
again, and none of them ever forks. A fork waits until no other thread is in a call: TVM's allocators have locks that
the child could never take.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

from mlc.config import physical_cores

__all__ = ["call", "configure", "environment"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


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


def call(count: int, function: Callable[_P, _T], *arguments: _P.args, **named: _P.kwargs) -> _T:
    """``function(...)`` in a thread that has ``count`` threads for compiled code; its result or what it raises.

    The main thread calls by itself; from others it takes 10 us to get there and back. As many of those calls go on at
    a time as the machine has CPUs (but at least two); others wait for their turn. Ctrl-C is heard when the function has
    ended. A forked child has threads of its own.
    """
    if _forking.locked():  # a fork that waits comes first
        with _forking:
            pass
    if threading.get_ident() == _main.ident and _main.forks_safely():
        _main.called = True
        with _main.calling:
            configure(count)
            return function(*arguments, **named)
    return cast(_T, _callers.run(lambda: _configured(count, lambda: function(*arguments, **named))))


def _configured(count: int, function: Callable[[], Any]) -> Any:
    configure(count)
    return function()


class _Caller:
    """A thread that does one job at a time. Two bare locks make the hand-over five times as fast as a future."""

    def __init__(self) -> None:
        self._job: Callable[[], Any] | None = None
        self._result: Any = None
        self._error: BaseException | None = None
        self.idle = True
        self._wanted, self._done = threading.Lock(), threading.Lock()
        self._wanted.acquire()
        self._done.acquire()
        threading.Thread(target=self._serve, name="mlc-caller", daemon=True).start()

    def run(self, job: Callable[[], Any]) -> Any:
        self._job, self.idle = job, False
        self._wanted.release()
        interrupted = self._wait()
        result, error = self._result, self._error
        self._result = self._error = None  # the arrays are the caller's alone
        if interrupted is not None or error is not None:
            raise interrupted or error  # type: ignore[misc]
        return result

    def _wait(self) -> BaseException | None:
        """Until the job is done, whatever signal handlers raise meanwhile: its arrays are in use."""
        interrupted = None
        while not self.idle:  # not the lock alone: a handler may raise when it has just been taken
            try:
                self._done.acquire()
            except BaseException as error:
                interrupted = error
        return interrupted

    def _serve(self) -> None:
        while True:
            self._wanted.acquire()
            assert self._job is not None
            try:
                self._result = self._job()
            except BaseException as error:
                self._error = error
            self._job, self.idle = None, True
            if self._done.locked():
                self._done.release()


class _Callers:
    """Threads that call; the one that was busy last, whose workers may still spin, is taken first."""

    def __init__(self) -> None:
        self._most = max(2, os.cpu_count() or 1)
        self._free = threading.Semaphore(self._most)
        self._idle: list[_Caller] = []

    def hold(self) -> None:
        """Wait until no call goes on, and let none begin."""
        for _ in range(self._most):
            self._free.acquire()

    def release(self) -> None:
        """Let calls begin."""
        self._free.release(self._most)

    def run(self, job: Callable[[], Any]) -> Any:
        with self._free:
            try:
                caller = self._idle.pop()
            except IndexError:
                caller = _Caller()
            try:
                return caller.run(job)
            finally:
                if caller.idle:
                    self._idle.append(caller)


@cache
def _reset() -> Callable[[], None] | None:
    """TVM's ``ResetThreadPool``, which ends the workers of the calling thread's pool and starts others: a C++ function
    that it exports without a name in its registry. None where it cannot be found."""
    spec = find_spec("tvm")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        try:
            library = ctypes.CDLL(str(Path(folder) / "lib" / "libtvm_runtime.so"))
            reset = library["_ZN3tvm7runtime9threading15ResetThreadPoolEv"]
        except (OSError, AttributeError):
            continue
        reset.argtypes, reset.restype = [], None
        return cast(Callable[[], None], reset)
    return None


#: turns for which a worker looks for work before it sleeps: TVM's default, and how many outlast the way to a fork
_SPINS, _FEWEST_SPINS = 300_000, 50_000


class _MainThread:
    """The thread that calls by itself. It starts its pool's workers anew when it forks: the child has none of them, and
    can throw their queues away only if nobody sleeps there, as new workers do not for a while."""

    def __init__(self) -> None:
        self.ident = threading.main_thread().ident
        self.called = self._renewed = False
        self.calling = threading.RLock()

    @staticmethod
    @cache
    def forks_safely() -> bool:
        """Whether that can be done: not where workers are told to sleep at once."""
        spins = os.environ.get("TVM_THREAD_POOL_SPIN_COUNT", "")
        return _reset() is not None and (int(spins) if spins.isdigit() else _SPINS) >= _FEWEST_SPINS

    def before_fork(self) -> None:
        """Renew the workers of the pool, if the main thread forks and has called."""
        reset = _reset()
        if self.called and threading.get_ident() == self.ident and reset is not None:
            reset()
            self._renewed = True

    def after_fork(self) -> None:
        """Give the child, whose main thread is the one that forked, workers of its own."""
        reset, self.ident = _reset(), threading.main_thread().ident
        if self._renewed and reset is not None:
            reset()
            _reached.clear()
        self._renewed = False

    def forked(self) -> None:
        """In the parent, whose new workers no thread count was asked of yet."""
        if self._renewed:
            _reached.clear()
        self._renewed = False


def _before_fork() -> None:
    _forking.acquire()
    _callers.hold()
    if threading.get_ident() != _main.ident:
        _main.calling.acquire()
    _main.before_fork()


def _in_parent() -> None:
    _main.forked()
    if threading.get_ident() != _main.ident:
        _main.calling.release()
    _callers.release()
    _forking.release()


def _in_child() -> None:
    global _callers, _forking
    _callers, _forking, _main.calling = _Callers(), threading.Lock(), threading.RLock()
    _main.after_fork()


_callers, _main, _forking = _Callers(), _MainThread(), threading.Lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
