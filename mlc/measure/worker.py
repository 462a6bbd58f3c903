"""The worker process: ``python -m mlc.measure.worker FOLDER KIND`` serves its parent's jobs until the pipe closes.

A job names a method of the runner that ``KIND`` selects (:data:`RUNNERS`); each job gets exactly one answer. A failure
that can be caught is an answer; anything else ends the process, which the parent notices.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from mlc.measure.protocol import Broken, Message, MessageReader, send

if TYPE_CHECKING:
    from mlc.measure.runner import Runner

__all__ = ["main"]

#: module and class by kind: one compiles what it runs, the other is given code
RUNNERS = {
    "compiling": ("mlc.measure.compiling_runner", "CompilingRunner"),
    "loading": ("mlc.measure.prebuilt_runner", "PrebuiltRunner"),
}

_GRACE = 2.0  # seconds after the parent's own limit at which a job ends its worker, should the parent be gone


def main(folder: str, kind: str) -> None:
    """Serve jobs from standard input to standard output until the parent closes them.

    A parent that was killed has left ``folder`` behind, which is then removed; a living one kills its workers.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # should memory run out, it is the candidate's fault, not the tuner's
        Path("/proc/self/oom_score_adj").write_text("1000")
    answers = os.dup(1)
    os.dup2(2, 1)  # what a candidate or a library prints must not end up among the answers
    module, name = RUNNERS[kind]
    runner = getattr(import_module(module), name)(int(os.environ["TVM_NUM_THREADS"]))
    jobs = MessageReader(0)
    try:
        send(answers, {"ready": True})
        while True:
            job = jobs.wait()
            signal.setitimer(signal.ITIMER_REAL, job["limit"] + _GRACE)
            answer = _answer(runner, job)
            signal.setitimer(signal.ITIMER_REAL, 0)
            send(answers, answer)
    except Broken:
        shutil.rmtree(folder, ignore_errors=True)


def _answer(runner: Runner, job: Message) -> Message:
    try:
        return getattr(runner, job["job"])(job)
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return {"failure": getattr(error, "failure", "run"), "detail": lines[-1][:500]}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
    os._exit(0)  # candidates may have left threads and destructors behind that are better not run
