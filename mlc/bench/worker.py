"""The process that runs one engine: ``python -m mlc.bench.worker``, requests and replies as pickles over pipes.

``("load", Job)`` -> input specifications; ``("run", feeds)`` -> outputs, and the feeds stay bound;
``("time", warmup, calls, seconds)`` -> seconds of each call. A reply is its length in eight bytes and the pickle of
``("ok", value)`` or ``("failed", text)``.
"""

from __future__ import annotations

import os
import pickle
import signal
import struct
import sys
import threading
import time
from typing import BinaryIO

from mlc.bench.engines import Call, Engine, load_engine
from mlc.errors import MlcError

__all__ = ["main", "time_calls"]


def main() -> int:
    """Serve until standard input closes."""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    # Libraries print to standard output; the replies get a pipe of their own.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return _serve(sys.stdin.buffer, replies)


def _end_with_parent(parent: int) -> None:
    """A benchmark that was killed leaves nothing running: this process ends its session, a tuner's children too."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _serve(requests: BinaryIO, replies: BinaryIO) -> int:
    engine: Engine | None = None
    call: Call | None = None
    while True:
        try:
            command, *arguments = pickle.load(requests)
        except EOFError:
            return 0
        try:
            value: object = None
            if command == "load":
                engine = load_engine(*arguments)
                value = engine.inputs
            elif command == "run":
                assert engine is not None
                call = engine.bind(*arguments)
                value = call()
            elif command == "time":
                assert call is not None
                value = time_calls(call, *arguments)
            reply = ("ok", value)
        except Exception as error:
            reply = ("failed", _reason(error))
        data = pickle.dumps(reply, protocol=pickle.HIGHEST_PROTOCOL)
        replies.write(struct.pack("<Q", len(data)) + data)
        replies.flush()


def time_calls(call: Call, warmup: int, calls: int, seconds: float) -> list[float]:
    """Seconds of each of ``calls`` calls after ``warmup`` untimed ones; no call starts once ``seconds`` are over."""
    for _ in range(warmup):
        call()
    times: list[float] = []
    started = time.perf_counter()
    while not times or (len(times) < calls and time.perf_counter() - started < seconds):
        before = time.perf_counter()
        call()
        times.append(time.perf_counter() - before)
    return times


def _reason(error: Exception) -> str:
    """One line; errors that are not ours say what they are."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    return text if isinstance(error, MlcError) else f"{type(error).__name__}: {text}".rstrip(": ")


if __name__ == "__main__":
    sys.exit(main())
