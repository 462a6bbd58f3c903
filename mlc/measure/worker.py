"""The worker's side: ``python -m mlc.measure.worker FOLDER KIND`` takes jobs from its parent until the pipe ends.

A job is a method of the bench that ``KIND`` names, :data:`BENCHES`; each gets exactly one answer. What a candidate
does wrong in an orderly way is an answer; what it does otherwise ends the process, which the parent notices.
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
    from mlc.measure.bench import Bench

__all__ = ["main"]

#: module and class by kind: one compiles what it runs, the other is given code
BENCHES = {"compiling": ("mlc.measure.workbench", "Workbench"), "loading": ("mlc.measure.loading", "LoadingBench")}

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
    module, name = BENCHES[kind]
    bench = getattr(import_module(module), name)(int(os.environ["TVM_NUM_THREADS"]))
    jobs = MessageReader(0)
    try:
        send(answers, {"ready": True})
        while True:
            job = jobs.wait()
            signal.setitimer(signal.ITIMER_REAL, job["limit"] + _GRACE)
            answer = _answer(bench, job)
            signal.setitimer(signal.ITIMER_REAL, 0)
            send(answers, answer)
    except Broken:
        shutil.rmtree(folder, ignore_errors=True)


def _answer(bench: Bench, job: Message) -> Message:
    try:
        return getattr(bench, job["job"])(job)
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return {"failure": getattr(error, "failure", "run"), "detail": lines[-1][:500]}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
    os._exit(0)  # candidates may have left threads and destructors behind that are better not run
