"""Tuning logs that were damaged or crafted: what is compiled with one is right, or the log is refused in one line.

``python -m tests.fuzz.logs --count 1000 --seed 0``
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

import numpy as np

import mlc
from mlc.cli.main import main as command
from mlc.errors import LogError
from mlc.log import TuningLog
from mlc.testing.measuring import FakeMeasurer
from mlc.tuning import TuneOptions, tune_tasks
from tests.fuzz.harness import SECONDS, Case, Outcome, main
from tests.fuzz.log_files import STRATEGIES, TARGET, TRIALS, model, prepare, tasks_of, written

__all__ = ["CASE_SECONDS", "STRATEGIES", "check", "warm_up"]

#: of the five commands of a case, on a machine that does other things too
CASE_SECONDS = 5 * SECONDS


#: what a check imports; importing it before the fork saves each case ten seconds
_NEEDED = (
    "matplotlib.pyplot", "mlc.artifact", "mlc.graph.pipeline", "mlc.log.metaschedule", "mlc.report.log_page",
    "mlc.tuning.session", "schedules.cpu", "schedules.lowering", "schedules.math", "tvm.s_tir.meta_schedule", "xgboost",
)


def warm_up() -> None:
    """Do once what every case needs."""
    for name in _NEEDED:
        import_module(name)
    prepare()


def check(case: Case) -> Outcome:
    """Look at the case's log with every command, go on tuning with some, and compile with all."""
    rng = case.rng()
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(name) / "log.db"
        written(case.strategy, rng, path)
        own = _commands(path, Path(name))
        for words in [own[0], rng.choice(own[1:]), rng.choice(own[1:])]:
            with _in_time(words[0]):
                _run(words)
        if rng.random() < 0.3:
            with contextlib.suppress(LogError), _in_time("tune"):
                _resume(path)
        with _in_time("compile"):
            return _compiled(path)


@contextlib.contextmanager
def _in_time(what: str) -> Iterator[None]:
    """Each command ends within the seconds that a hang is told by, as far as it is not others that keep the machine."""
    began = time.process_time()
    yield
    if (took := time.process_time() - began) > SECONDS:
        raise AssertionError(f"{what} took {took:.0f} s")


def _commands(path: Path, folder: Path) -> list[list[str]]:
    """The first is the one that the damage is for."""
    log, target = ["--log", str(path)], ["--target", "x86-64-v3"]
    commands = [
        ["check", str(path)], ["check", str(path), "--salvage", str(folder / "saved.db")], ["show", *log],
        ["show", "--sessions", *log], ["show", "--task", "a", *log, "--json"],
        ["merge", str(path), "--log", f"{path}2"],
        ["export", str(folder / "out.jsonl"), *log], ["prune", str(folder / "pruned.db"), *log],
        ["show", "--plot", str(folder / "plot.html"), *log],
        ["export", "--metaschedule", str(folder / "theirs"), *log],
    ]
    if path.with_suffix(".jsonl").exists():
        commands.insert(0, ["import", str(path.with_suffix(".jsonl")), *log])
    if (folder / "database").exists():
        commands.insert(0, ["import", str(folder / "database"), *log, *target])
    return commands


def _run(words: Sequence[str]) -> None:
    """``mlc log ...`` succeeds, or fails in one line."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = command(["log", *words])
    errors = [line for line in said.getvalue().splitlines() if not line.startswith("mlc: warning: ")]
    if "defect" in said.getvalue() or len(errors) > 1 or code not in (0, 1) or (code == 0 and errors):
        raise AssertionError(f"mlc log {words[0]} ended with {code}: {said.getvalue()[:300]}")


def _resume(path: Path) -> None:
    with TuningLog(path) as log:
        options = TuneOptions(trials=TRIALS + 4, resume=True, batch=2)
        tune_tasks(tasks_of(), TARGET, log, options, FakeMeasurer(lambda values: 1e-5 * (1 + sum(values) % 5)))


def _compiled(path: Path) -> Outcome:
    rng = np.random.default_rng(3)
    x, y, z = (rng.standard_normal(shape, dtype=np.float32) for shape in ((24, 64), (64, 48), (48,)))
    powers = np.exp(np.maximum(x.astype(np.float64) @ y + z, 0))
    (found,) = mlc.compile(model(), TARGET, path)(x, y, z)
    right = np.allclose(found, powers / powers.sum(axis=1, keepdims=True), rtol=1e-4, atol=1e-7)
    return Outcome.RIGHT if right else Outcome.WRONG


if __name__ == "__main__":
    warm_up()
    sys.exit(main(list(STRATEGIES), check, seconds=CASE_SECONDS))
