"""Damaged and crafted files, each read in a process of its own: what came of it, and a table of that.

A check reads (and runs) one damaged thing and says whether what it gave is right, wrong or refused. What it cannot say
of itself is seen from outside: that it crashed, hung, took too much memory, or ended in a traceback.

A module of this folder names its strategies and ends in :func:`main`; ``python -m tests.fuzz.artifacts --count 1000
--seed 0`` then prints the table and exits with 1 if anything was wrong, crashed, hung or ended in a traceback.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import os
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from random import Random
from typing import Any

from rich.progress import track

from mlc.config import physical_cores
from mlc.errors import MlcError
from mlc.report.console import stderr_console

__all__ = ["BAD", "Case", "Outcome", "Verdict", "cases", "main", "run", "table"]

#: what a case may take of the processors, with its children
SECONDS = 10.0
#: how many times as long it may last, on a machine that does other things too
_PATIENCE = 3
EXTRA_BYTES = 2 << 30


class Outcome(Enum):
    """What came of a case. A check returns one of the first three, or raises :class:`MlcError` for a refusal."""

    REFUSED = "refused in one line"
    RIGHT = "right"
    WRONG = "wrong"
    CRASHED = "crashed"
    HUNG = "hung"
    TRACEBACK = "traceback"


#: what must never come of a damaged file
BAD = (Outcome.WRONG, Outcome.CRASHED, Outcome.HUNG, Outcome.TRACEBACK)


@dataclass(frozen=True)
class Case:
    """One damaged file: how it is damaged, and the seed of all that is random in that."""

    strategy: str
    seed: int

    def rng(self) -> Random:
        """Random numbers of this case alone: the same in every run."""
        return Random(f"{self.strategy}/{self.seed}")


@dataclass(frozen=True)
class Verdict:
    """What came of a case; ``detail`` is the refusal, or the last line of what went wrong."""

    case: Case
    outcome: Outcome
    detail: str = ""
    seconds: float = 0.0


Check = Callable[[Case], Outcome]


def cases(strategies: Sequence[str], count: int, seed: int = 0) -> list[Case]:
    """``count`` cases, dealt to the strategies in turn; runs with other seeds share none of them."""
    return [Case(strategies[i % len(strategies)], seed * 1_000_000 + i // len(strategies)) for i in range(count)]


def run(
    wanted: Iterable[Case], check: Check, seconds: float = SECONDS, extra_bytes: int = EXTRA_BYTES
) -> list[Verdict]:
    """Check every case in a process forked for it, with ``seconds`` of processor time and thrice as long to live.

    ``extra_bytes`` is how much its address space may grow (a :class:`MemoryError` that is not made into one line counts
    as a traceback). Import what the check needs before the call, so that every process has it; run no compiled code
    before it, since the threads of a pool do not survive a fork.
    """
    return [_verdict(case, check, seconds, extra_bytes) for case in wanted]


#: of the processes that :func:`main` forks: a check need not be picklable
_arguments: list[Any] = []


def _verdict_of(case: Case) -> Verdict:
    return _verdict(case, *_arguments)


def _verdict(case: Case, check: Check, seconds: float, extra_bytes: int) -> Verdict:
    began = time.monotonic()
    sys.stdout.flush()
    with tempfile.TemporaryFile() as noise:
        read_end, write_end = os.pipe()
        child = os.fork()
        if not child:
            os.close(read_end)
            _child(case, check, write_end, noise.fileno(), extra_bytes)
        os.close(write_end)
        with os.fdopen(read_end, "rb") as pipe:
            said, ended = _said(pipe.fileno(), began + _PATIENCE * seconds)
        if not ended:
            os.killpg(child, signal.SIGKILL)
        _, status, used = os.wait4(child, 0)
        noise.seek(0)
        in_time = ended and used.ru_utime + used.ru_stime <= seconds
        outcome, detail = _seen(said, in_time, status, noise.read().decode(errors="replace"))
    return Verdict(case, outcome, detail, time.monotonic() - began)


def _said(pipe: int, deadline: float) -> tuple[bytes, bool]:
    """What the child wrote, and whether it closed its end (as a process does that dies) before the deadline."""
    said = b""
    while (left := deadline - time.monotonic()) > 0:
        if select.select([pipe], [], [], left)[0]:
            piece = os.read(pipe, 65536)
            if not piece:
                return said, True
            said += piece
    return said, False


def _seen(said: bytes, in_time: bool, status: int, noise: str) -> tuple[Outcome, str]:
    lines = noise.strip().splitlines() or [""]
    if not in_time:
        return Outcome.HUNG, lines[-1]
    if os.WIFSIGNALED(status):
        return Outcome.CRASHED, f"{signal.Signals(os.WTERMSIG(status)).name} {lines[-1]}".strip()
    if not said:
        return Outcome.CRASHED, f"exit status {os.waitstatus_to_exitcode(status)} {lines[-1]}".strip()
    name, detail = json.loads(said)
    if "Traceback (most recent call last)" in noise:  # of a destructor, a thread, a process of its own
        return Outcome.TRACEBACK, lines[-1]
    return Outcome[name], detail


def _child(case: Case, check: Check, pipe: int, noise: int, extra_bytes: int) -> None:
    """Say the outcome into ``pipe`` and end, without ever returning to the caller's stack."""
    try:
        os.setsid()
        os.dup2(noise, 1)
        os.dup2(noise, 2)
        sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
        faulthandler.disable()  # a test runner's writes elsewhere
        _limit_memory(extra_bytes)
        os.write(pipe, json.dumps(_outcome(case, check)).encode())
    except BaseException:
        traceback.print_exc()
        os._exit(70)
    os._exit(0)


def _outcome(case: Case, check: Check) -> tuple[str, str]:
    try:
        return check(case).name, ""
    except MlcError as error:
        text = str(error)
        one_line = text.strip() and len(text.splitlines()) == 1
        return (Outcome.REFUSED if one_line else Outcome.TRACEBACK).name, text
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = (str(error).splitlines() or [""])[0][:200]
        return Outcome.TRACEBACK.name, f"{type(error).__name__} at {where.name}:{where.lineno}: {text}"


def _limit_memory(extra_bytes: int) -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + extra_bytes, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def table(verdicts: Sequence[Verdict]) -> str:
    """One line for each strategy and one for all: how many cases there were, and how many came out how."""
    counts: dict[str, Counter[Outcome]] = {}
    for verdict in verdicts:
        counts.setdefault(verdict.case.strategy, Counter())[verdict.outcome] += 1
    total = sum(counts.values(), Counter())
    rows = [("strategy", "cases", *(outcome.value for outcome in Outcome))]
    rows += [_row(name, count) for name, count in [*counts.items(), ("all", total)]]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) if i else cell.ljust(width)
                               for i, (cell, width) in enumerate(zip(row, widths, strict=True))) for row in rows)


def _row(name: str, count: Counter[Outcome]) -> tuple[str, ...]:
    return name, str(sum(count.values())), *(str(count[outcome]) for outcome in Outcome)


def main(
    strategies: Sequence[str], check: Check, argv: Sequence[str] | None = None, *, seconds: float = SECONDS,
    extra_bytes: int = EXTRA_BYTES,
) -> int:
    """The command line that every module of this folder has; returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=100, help="how many cases (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="which ones (default: 0)")
    parser.add_argument("--only", choices=strategies, action="append", metavar="STRATEGY", help="these strategies")
    parser.add_argument("--verbose", action="store_true", help="every case, not only what went wrong")
    parser.add_argument("--jobs", type=int, default=physical_cores(), help="processes (default: one a core)")
    parser.add_argument("--state", type=Path, metavar="FILE", help="where to note what came of each, and look it up")
    args = parser.parse_args(argv)
    wanted = cases(args.only or strategies, args.count, args.seed)
    _arguments[:] = check, seconds, extra_bytes
    if args.state is not None:
        try:
            args.state.parent.mkdir(parents=True, exist_ok=True)
            args.state.open("a").close()
        except OSError as error:
            parser.error(f"--state must be a file that can be written to, but {error}")
    known = _noted(args.state)
    console, verdicts = stderr_console(), [known[case] for case in wanted if case in known]
    missing = [case for case in wanted if case not in known]
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("fork")) as pool:
        found = as_completed([pool.submit(_verdict_of, case) for case in missing])  # forks before anything has threads
        for future in track(found, "checking", len(missing), console=console, transient=True):
            verdicts.append(verdict := future.result())
            _note(verdict, args.state)
            if args.verbose or verdict.outcome in BAD:
                print(f"{verdict.case.strategy} {verdict.case.seed}: {verdict.outcome.value} ({verdict.detail})",
                      flush=True)
    verdicts.sort(key=lambda verdict: strategies.index(verdict.case.strategy))
    print(table(verdicts))
    return int(any(verdict.outcome in BAD for verdict in verdicts))


def _noted(state: Path | None) -> dict[Case, Verdict]:
    """What an earlier run noted: not what ended badly, which is tried again, nor a line that a killed run left torn."""
    found = {}
    for line in state.read_text(encoding="utf-8").splitlines() if state is not None and state.exists() else ():
        with suppress(ValueError):
            strategy, seed, outcome, detail, seconds = json.loads(line)
            verdict = Verdict(Case(strategy, seed), Outcome[outcome], detail, seconds)
            if verdict.outcome not in BAD:
                found[verdict.case] = verdict
    return found


def _note(verdict: Verdict, state: Path | None) -> None:
    if state is not None:
        noted = [verdict.case.strategy, verdict.case.seed, verdict.outcome.name, verdict.detail, verdict.seconds]
        with state.open("a", encoding="utf-8") as file:
            file.write(json.dumps(noted) + "\n")
