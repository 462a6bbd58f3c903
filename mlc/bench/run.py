"""Times engines round-robin, so that a slow phase of the machine affects all of them alike."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlc.bench.client import Worker, WorkerFailed
from mlc.bench.engines import EngineSpec, Job, environment, expand, is_ours
from mlc.config import physical_cores
from mlc.errors import ArtifactError, UsageError
from mlc.measure.machine import machine_id

if TYPE_CHECKING:
    from mlc.frontend.model import TensorSpec

__all__ = ["BenchEvent", "BenchResult", "EngineResult", "Timing", "output_error", "run_bench"]

_REFERENCE = "onnxruntime"
_PROTOBUF_LIMIT = 2 << 30  # bytes that one message can hold


@dataclass(frozen=True)
class Timing:
    """How calls are timed. Times are seconds.

    An engine's turn is ``warmup`` untimed calls, since the others emptied its caches, and then timed calls for
    ``turn`` seconds, at least one. ``first_warmup`` calls come once before the first round. An engine that a whole turn
    is too short for gives up its later turns once it used ``slow`` times its share.
    """

    rounds: int = 12
    seconds: float | None = None  # instead of rounds: go on until the timed part took this long, three rounds at least
    turn: float = 0.2
    calls: int = 1000
    warmup: int = 2
    first_warmup: int = 3
    slow: float = 4.0
    fewest_rounds: int = 3
    load_timeout: float = 900.0
    call_timeout: float = 120.0


@dataclass(frozen=True)
class BenchEvent:
    """Progress: ``loading``, ``ready``, ``failed`` (``detail`` says why) of an engine, ``round`` of all."""

    kind: str
    engine: str = ""
    detail: str = ""
    seconds: float = 0.0
    round: int = 0
    rounds: int = 0  # 0 where the end is set by seconds


@dataclass(frozen=True)
class EngineResult:
    """One row. ``times`` are seconds of single calls; ``error`` is why there are none.

    ``max_abs_err`` and ``max_rel_err`` compare all outputs with the reference engine's; the relative one is divided by
    the largest magnitude of the reference output. ``None`` where no reference ran. ``precision`` is that of the
    :class:`EngineSpec`.
    """

    engine: str
    times: tuple[float, ...] = ()
    max_abs_err: float | None = None
    max_rel_err: float | None = None
    error: str = ""
    load_seconds: float = 0.0
    precision: str = ""

    def quantile_ms(self, q: float) -> float | None:
        """Milliseconds at the quantile; ``None`` for an engine that failed."""
        return float(np.quantile(self.times, q)) * 1e3 if self.times and not self.error else None

    def to_json(self) -> dict[str, Any]:
        """The row of ``mlc bench --json``; an engine that failed has ``error`` and nulls, and one that may round
        operands the ``precision``."""
        row: dict[str, Any] = {
            "engine": self.engine,
            "median_ms": self.quantile_ms(0.5), "p10_ms": self.quantile_ms(0.1), "p90_ms": self.quantile_ms(0.9),
            "max_abs_err": self.max_abs_err, "max_rel_err": self.max_rel_err,
            **({"precision": self.precision} if self.precision else {}),
        }
        return {**row, "error": self.error} if self.error else row


@dataclass(frozen=True)
class BenchResult:
    """Every engine's row in the order they were asked for. ``target`` is what mlc's module was built for, empty where
    none is among them; the other engines choose for themselves."""

    model: str
    machine: str
    threads: int
    results: tuple[EngineResult, ...]
    reference: str = ""
    ours: tuple[str, ...] = field(default=(), repr=False)
    target: str = ""

    @property
    def speedup_over_best_peer(self) -> float | None:
        """Median of the fastest other engine over ours (the first mlc engine asked for); above 1 means faster."""
        medians = {r.engine: m for r in self.results if (m := r.quantile_ms(0.5)) is not None}
        peers = [m for engine, m in medians.items() if engine not in self.ours]
        mine = [medians[engine] for engine in self.ours if engine in medians]
        return min(peers) / mine[0] if peers and mine else None

    def to_json(self) -> dict[str, Any]:
        """The document of ``mlc bench --json``."""
        return {
            "model": self.model, "machine": self.machine, "threads": self.threads,
            "results": [result.to_json() for result in self.results],
            "speedup_over_best_peer": self.speedup_over_best_peer,
        }


def run_bench(
    model: Any,
    engines: Sequence[str | EngineSpec],
    *,
    threads: int | None = None,
    timing: Timing | None = None,
    inputs: Mapping[str, np.ndarray] | None = None,
    reference: Sequence[np.ndarray] | None = None,
    program: str | os.PathLike[str] | None = None,
    example_inputs: Sequence[Any] | None = None,
    name: str | None = None,
    seed: int = 0,
    on_event: Callable[[BenchEvent], None] = lambda event: None,
) -> BenchResult:
    """Run engines on one model.

    ``model`` is the path of an ONNX file or of a compiled module (``.so``), an ``onnx.ModelProto``, a
    ``torch.nn.Module`` with ``example_inputs``, or an exported PyTorch program. ``inputs`` are drawn with ``seed``
    where they are not given. ``reference`` are the outputs that errors are relative to (default: those of onnxruntime,
    else of the first engine whose ``precision`` is that of the model, if there is one), ``program`` the path of the
    same model as an exported PyTorch program, for PyTorch's engines. Every engine gets a process of its own with
    ``threads`` threads (default: the physical cores), and a row in the result, whatever happens to it. Raises
    :class:`UsageError` for what does not fit together.
    """
    specs = expand(engines)
    if not specs:
        raise UsageError("at least one engine must be given, got none; name onnxruntime, say")
    threads = threads or physical_cores()
    with tempfile.TemporaryDirectory(prefix="mlc-bench-") as folder:
        source = _stage(model, example_inputs, Path(folder))
        if program is not None:
            source = replace(source, program_path=str(program))
        specs = [_with_artifact(spec, source) for spec in specs]
        jobs = [Job(spec, threads, source.onnx_path, source.program_path) for spec in specs]
        session = _Session(jobs, timing or Timing(), on_event)
        with contextlib.closing(session):
            session.load()
            session.compare(inputs, seed, reference)
            session.time()
            rows = tuple(session.rows[spec.name].result() for spec in specs)
        ours = tuple(spec.name for spec in specs if is_ours(spec))
        target = next((found for spec in specs if (found := _built_for(spec))), "")
        return BenchResult(name or source.name, machine_id(), threads, rows, session.reference, ours, target)


def _built_for(spec: EngineSpec) -> str:
    """The target of an engine's module; empty if there is none that can be read."""
    from mlc.artifact import artifact
    from mlc.artifact.executable import pick

    if not spec.artifact:
        return ""
    try:
        described = [variant.metadata for variant in artifact.read(spec.artifact).variants]
        return str(described[pick(described, spec.artifact)]["target"])
    except ArtifactError:  # its row says so
        return ""


@dataclass
class _Row:
    """An engine on its way to an :class:`EngineResult`."""

    job: Job
    worker: Worker | None = None
    inputs: tuple[TensorSpec, ...] = ()
    outputs: list[np.ndarray] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    errors: tuple[float | None, float | None] = (None, None)
    failure: str = ""
    load_seconds: float = 0.0

    def result(self) -> EngineResult:
        times = () if self.failure else tuple(self.times)
        absolute, relative = self.errors
        spec = self.job.spec
        return EngineResult(spec.name, times, absolute, relative, self.failure, self.load_seconds, spec.precision)


class _Session:
    """The workers of one benchmark."""

    def __init__(self, jobs: Sequence[Job], timing: Timing, on_event: Callable[[BenchEvent], None]) -> None:
        self.rows = {job.spec.name: _Row(job) for job in jobs}
        self.timing = timing
        self.emit = on_event
        self.reference = ""

    def close(self) -> None:
        """End every worker."""
        for row in self.rows.values():
            if row.worker is not None:
                row.worker.close()

    def load(self) -> None:
        """Start and load one engine after the other: loading uses every core."""
        for name, row in self.rows.items():
            self.emit(BenchEvent("loading", name))
            started = time.monotonic()
            row.worker = Worker(environment(row.job.threads))
            timeout = self.timing.load_timeout + 2 * row.job.spec.seconds
            with self._failing(row):
                row.inputs = row.worker.ask("load", row.job, timeout=timeout)
                row.load_seconds = time.monotonic() - started
                self.emit(BenchEvent("ready", name, seconds=row.load_seconds))

    def compare(
        self, inputs: Mapping[str, np.ndarray] | None, seed: int, given: Sequence[np.ndarray] | None = None
    ) -> None:
        """Run every engine once on the same inputs and compare the outputs with those given, else the reference's."""
        from mlc.networks.inputs import random_inputs

        running = self._running()
        if not running:
            return
        feeds = {**random_inputs(running[0].inputs, seed), **(inputs or {})}
        for row in running:
            assert row.worker is not None
            with self._failing(row):
                row.outputs = row.worker.ask("run", feeds, timeout=self.timing.call_timeout)
                row.worker.settle()
        running = self._running()
        engine = min(running, key=lambda row: _trust(row.job.spec), default=None)
        if engine is None:
            return
        self.reference = engine.job.spec.name if given is None else "the reference"
        reference = engine.outputs if given is None else given
        for row in running:
            errors, why = output_error(row.outputs, reference)
            if why:
                self._fail(row, f"wrong output: {why}")
            else:
                row.errors = errors
        for row in running:
            row.outputs = []

    def time(self) -> None:
        """The rounds. Who begins moves on by one each round, so that nobody always follows the same neighbour."""
        timing, started, number = self.timing, time.monotonic(), 0
        spent = dict.fromkeys(self.rows, 0.0)
        while self._goes_on(number, started):
            running = self._running()
            if not running:
                return
            shift = number % len(running)
            for row in running[shift:] + running[:shift]:
                if number >= timing.fewest_rounds and spent[row.job.spec.name] > timing.slow * self._share():
                    continue
                before = time.monotonic()
                self._turn(row, first=number == 0)
                spent[row.job.spec.name] += time.monotonic() - before
            number += 1
            rounds = 0 if timing.seconds is not None else timing.rounds
            self.emit(BenchEvent("round", round=number, rounds=rounds, seconds=time.monotonic() - started))

    def _turn(self, row: _Row, first: bool) -> None:
        timing = self.timing
        # A call that fills its turn by itself finds no caches worth warming.
        slow = bool(row.times) and min(row.times) > timing.turn
        warmup = timing.first_warmup if first else 0 if slow else timing.warmup
        assert row.worker is not None
        with self._failing(row):
            limit = timing.call_timeout * (warmup + 1) + timing.turn
            row.times += row.worker.ask("time", warmup, timing.calls, timing.turn, timeout=limit)
            row.worker.settle()

    def _goes_on(self, number: int, started: float) -> bool:
        if self.timing.seconds is None:
            return number < self.timing.rounds
        return number < self.timing.fewest_rounds or time.monotonic() - started < self.timing.seconds

    def _share(self) -> float:
        """Seconds that one engine may expect of the timed part."""
        if self.timing.seconds is None:
            return self.timing.rounds * self.timing.turn
        return self.timing.seconds / max(1, len(self.rows))

    def _running(self) -> list[_Row]:
        return [row for row in self.rows.values() if not row.failure]

    @contextlib.contextmanager
    def _failing(self, row: _Row) -> Iterator[None]:
        try:
            yield
        except WorkerFailed as error:
            self._fail(row, str(error))

    def _fail(self, row: _Row, why: str) -> None:
        row.failure, row.errors, row.outputs = why, (None, None), []
        if row.worker is not None:
            row.worker.close()
        self.emit(BenchEvent("failed", row.job.spec.name, detail=why))


def _trust(spec: EngineSpec) -> tuple[bool, bool]:
    """Less for an engine whose outputs are the better reference."""
    return bool(spec.precision), spec.kind != _REFERENCE


def output_error(
    outputs: Sequence[np.ndarray], reference: Sequence[np.ndarray]
) -> tuple[tuple[float, float], str]:
    """Largest absolute error, and relative to the largest magnitude of each reference output; or why there is none.

    Equal infinities and NaN at equal places agree; any other NaN or infinity is wrong.
    """
    if len(outputs) != len(reference):
        return (0.0, 0.0), f"{len(outputs)} outputs where the reference has {len(reference)}"
    absolute = relative = 0.0
    for number, (ours, theirs) in enumerate(zip(outputs, reference, strict=True)):
        if ours.shape != theirs.shape:
            return (0.0, 0.0), f"output {number} has shape {ours.shape} where the reference has {theirs.shape}"
        a, b = ours.astype(np.float64), theirs.astype(np.float64)
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        with np.errstate(invalid="ignore"):
            difference = np.where(same, 0.0, np.abs(a - b))
        if not np.isfinite(difference).all():
            return (0.0, 0.0), f"output {number} has NaN or infinity where the reference has none"
        if difference.size:
            worst = float(difference.max())
            magnitude = float(np.abs(np.where(np.isfinite(b), b, 0.0)).max())
            absolute = max(absolute, worst)
            relative = max(relative, worst / magnitude if magnitude else float(worst > 0))
    return (absolute, relative), ""


@dataclass(frozen=True)
class _Source:
    name: str
    onnx_path: str = ""
    program_path: str = ""
    artifact: str = ""


def _stage(model: Any, example_inputs: Sequence[Any] | None, folder: Path) -> _Source:
    """Put the model where worker processes can read it."""
    if isinstance(model, str | os.PathLike):
        path = Path(model)
        if not path.is_file():
            raise UsageError(f"the model must be a file, but there is no {path}; check the path")
        if path.suffix == ".so":
            return _Source(path.stem, artifact=str(path))
        if path.suffix == ".pt2":
            import torch

            return _stage_program(torch.export.load(path), path.stem, folder)
        return _Source(path.stem, onnx_path=str(path))
    if type(model).__name__ == "ModelProto":  # its class lives in a module named after the protobuf build
        return _Source(model.graph.name or "model", onnx_path=_save_onnx(model, folder))
    import torch

    from mlc.frontend.pytorch import export_module

    if isinstance(model, torch.nn.Module):
        return _stage_program(export_module(model, example_inputs, type(model).__name__), type(model).__name__, folder)
    if isinstance(model, torch.export.ExportedProgram):
        return _stage_program(model, "program", folder)
    raise UsageError(f"a model must be a path, an onnx.ModelProto or a torch.nn.Module, got {type(model).__name__}")


def _stage_program(program: Any, name: str, folder: Path) -> _Source:
    """The program itself for PyTorch, and its ONNX export for the others."""
    import torch

    from mlc.errors import ModelError
    from mlc.frontend.pytorch import to_onnx

    torch.export.save(program, folder / "program.pt2")
    onnx_path = ""
    with contextlib.suppress(ModelError):  # PyTorch's own engines run what ONNX cannot hold
        onnx_path = _save_onnx(to_onnx(program, name), folder)
    return _Source(name, onnx_path, str(folder / "program.pt2"))


def _save_onnx(model: Any, folder: Path) -> str:
    import onnx

    path = folder / "model.onnx"
    if model.ByteSize() < _PROTOBUF_LIMIT:
        onnx.save(model, path)
    else:
        moved = onnx.ModelProto()
        moved.CopyFrom(model)  # saving to external data takes the weights out of the message it is given
        onnx.save(moved, path, save_as_external_data=True)
    return str(path)


def _with_artifact(spec: EngineSpec, source: _Source) -> EngineSpec:
    if is_ours(spec) and not spec.artifact and source.artifact:
        return replace(spec, artifact=source.artifact)
    return spec
