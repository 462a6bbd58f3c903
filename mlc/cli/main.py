"""The ``mlc`` command: parses arguments, dispatches to a command, and turns every outcome into an exit code.

0 is success, 2 a usage error, 1 any other failure, 143 an end by SIGTERM. Errors are one line on standard error; with
``--json`` the same line is also the document on standard output, so that a script always has one to read.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from mlc.cli import bench, compile, doctor, jobs, log, rules, run, targets, tune, worker
from mlc.cli.outcome import Command, Outcome
from mlc.config import SETTINGS, get_int
from mlc.errors import MlcError, UsageError
from mlc.text import one_line, visible

__all__ = ["COMMANDS", "finish", "main", "parser"]

COMMANDS: tuple[Command, ...] = (
    tune.COMMAND, compile.COMMAND, run.COMMAND, bench.COMMAND, log.COMMAND, rules.COMMAND, targets.COMMAND,
    doctor.COMMAND, worker.COMMAND, jobs.COMMAND,
)


#: seconds that a command has to end in, after a signal, until the next signal ends that as well
_TIDYING = 5.0


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ours: one line, with the way to the help."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; `{self.prog} --help` lists what it takes")


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    settings = "\n".join(f"  {s.name:<17} {s.help}" for s in SETTINGS.values())
    top = _Parser(
        prog="mlc", description="A tensor-program autotuning compiler on Apache TVM.",
        epilog=f"environment variables:\n{settings}",
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )
    top.add_argument("--version", action="store_true", help="print the version and exit")
    _add_common(top)
    commands = top.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for command in COMMANDS:
        sub = commands.add_parser(
            command.name, help=command.help, description=command.help, epilog=command.epilog or None,
            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
        )
        command.add_arguments(sub)
        for leaf in _leaves(sub):
            _add_common(leaf)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; no error leaves it."""
    words = list(sys.argv[1:] if argv is None else argv)
    terminated: list[int] = []
    with _orderly_end(terminated):
        code = finish(lambda: _dispatch(words), as_json="--json" in words, debug="--debug" in words)
    return 128 + terminated[0] if terminated else code


@contextmanager
def _orderly_end(received: list[int]) -> Iterator[None]:
    """SIGTERM ends the command as Ctrl-C does, so that workers and temporary files are gone, and is noted."""
    if threading.current_thread() is not threading.main_thread():  # where Python allows no handlers
        yield
        return

    latest = -math.inf

    def terminate(number: int, _frame: object) -> None:
        nonlocal latest
        received.append(number)
        if time.monotonic() > latest + _TIDYING:  # another one must not end the tidying up
            latest = time.monotonic()
            raise KeyboardInterrupt("terminated")

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def finish(run: Callable[[], Outcome | None], *, as_json: bool = False, debug: bool = False) -> int:
    """Call ``run``, print what it hands back or why it failed, and return the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # an ASCII terminal must not turn success into a failure
    try:
        debug = debug or get_int("MLC_DEBUG") > 0
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            outcome = run()
        if outcome is not None:
            _print(outcome, as_json)
        sys.stdout.flush()
        return outcome.exit_code if outcome else 0
    except MlcError as error:
        return _fail(error, str(error), error.exit_code, as_json, debug)
    except KeyboardInterrupt as error:
        return _fail(error, str(error) or "interrupted", 1, as_json, debug)
    except BrokenPipeError:  # the reader went away: `mlc log show | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (OSError, MemoryError) as error:
        return _fail(error, str(error) or type(error).__name__, 1, as_json, debug)
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[-1]
        message = f"{type(error).__name__}: {line}; this is a defect in mlc: run again with --debug for the trace"
        return _fail(error, message, 1, as_json, debug)


def _dispatch(words: list[str]) -> Outcome | None:
    top = parser()
    try:
        args = top.parse_args(words)
    except SystemExit:  # --help has printed what was asked for
        return None
    if args.version:
        from mlc.installation import installed

        print(f"mlc {installed('mlc')}")
        return None
    if args.command is None:
        raise UsageError("a command is needed: " + ", ".join(c.name for c in COMMANDS) + "; `mlc --help` explains")
    args.json, args.debug = getattr(args, "json", False), getattr(args, "debug", False)
    command = next(c for c in COMMANDS if c.name == args.command)
    if command.needs_tvm:
        from mlc.installation import check_pins
        from mlc.subprocesses import import_tvm

        check_pins()
        import_tvm()
    return command.execute(args)


def _add_common(sub: argparse.ArgumentParser) -> None:
    group = sub.add_argument_group("output")
    group.add_argument("--json", action="store_true", default=argparse.SUPPRESS,
                       help="one JSON document on standard output, progress on standard error")
    group.add_argument("--debug", action="store_true", default=argparse.SUPPRESS,
                       help="show the traceback of an error")


def _leaves(sub: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """The parser itself, or those of its own sub-commands."""
    for action in sub._actions:
        if isinstance(action, argparse._SubParsersAction):
            return list(action.choices.values())
    return [sub]


def _print(outcome: Outcome, as_json: bool) -> None:
    if as_json:
        print(json.dumps(_plain(outcome.document), indent=2, default=str, allow_nan=False))
    elif outcome.render is not None:
        from mlc.report.console import stdout_console

        outcome.render(stdout_console())


def _plain(value: Any) -> Any:
    """The value with what JSON can't say as null (infinity, NaN) or escaped (bytes of a name that are no UTF-8)."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {_plain(str(k)): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _warn(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
    """Warnings are one line too."""
    print(f"mlc: warning: {one_line(str(message))}", file=sys.stderr)


def _fail(error: BaseException, message: str, code: int, as_json: bool, debug: bool) -> int:
    if debug:
        print(visible("".join(traceback.format_exception(error))), end="", file=sys.stderr)
    line = one_line(message)
    print(f"mlc: error: {line}", file=sys.stderr)
    if as_json:
        print(json.dumps({"error": {"kind": type(error).__name__, "message": line}}))
    return code


if __name__ == "__main__":
    sys.exit(main())
