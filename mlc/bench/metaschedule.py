"""TVM's MetaSchedule with a time budget, in a process that is killed when the budget is used up.

MetaSchedule counts trials only, and it cannot be interrupted inside a batch; its database is on disk, so what it found
by then counts. Run as ``python -m mlc.bench.metaschedule FOLDER TARGET``: reads ``FOLDER/module.json``, prints
``ready`` once everything is imported (20 s that are no part of the budget), and tunes until it is ended.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from mlc import subprocesses
from mlc.errors import BuildError

if TYPE_CHECKING:
    from mlc.target import Target

__all__ = ["build_cuda", "main", "tune", "tuned"]

_START_TIMEOUT = 600.0  # seconds for the imports, on a busy machine
_BUILD_TIMEOUT = 120.0  # seconds a candidate; each batch's builders import for 20 of MetaSchedule's default 30


def tune(mod: Any, attributes: str, folder: Path, seconds: float) -> int:
    """Tune the tasks of a lowered Relax module for ``seconds``; returns how many trials were recorded in ``folder``.

    ``attributes`` is the target as JSON.
    """
    import tvm

    (folder / "module.json").write_text(tvm.ir.save_json(mod))
    command = subprocesses.command("mlc.bench.metaschedule", str(folder), attributes)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
                               env=subprocesses.environment())
    try:
        if not _wait_for_ready(process, time.monotonic() + _START_TIMEOUT):
            raise BuildError(f"MetaSchedule must start, but its process ended with {process.poll()}; see its output")
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            pass  # the usual end
        else:
            if process.returncode:
                raise BuildError(f"MetaSchedule must not fail, but its process ended with {process.returncode}")
    finally:
        _end(process)
    trials = _drop_torn_records(folder / "database_tuning_record.json")
    if not trials:
        raise BuildError(f"MetaSchedule must finish a batch in its budget, but did not in {seconds:g} s; give it more")
    return trials


def tuned(mod: Any, target: Target, folder: Path, seconds: float) -> Any:
    """A Relax module whose tensor functions MetaSchedule had ``seconds`` for, its records being in ``folder``: those
    that it got to are scheduled. Raises :class:`BuildError`."""
    import tvm
    from tvm import relax
    from tvm.relax.pipeline import static_shape_tuning_pipeline

    with target.tvm:
        lowered = tvm.transform.Sequential([
            relax.transform.DecomposeOpsForInference(), relax.transform.CanonicalizeBindings(),
            relax.get_pipeline("zero"),
        ])(mod)
    tune(lowered, target.attrs, folder, seconds)
    with target.tvm as kind:
        return static_shape_tuning_pipeline(0, kind, str(folder))(mod)


def build_cuda(mod: Any, target: Any, _params: Any) -> Any:
    """A candidate for a GPU, by the compiler and with the flags of mlc's own."""
    from tvm.s_tir.meta_schedule.builder.local_builder import default_build

    from mlc.codegen.cuda import architectures, machine_code

    with machine_code(architectures(target)):
        return default_build(mod, target, _params)


def _wait_for_ready(process: subprocess.Popen[str], deadline: float) -> bool:
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == "ready":
            return True
        if time.monotonic() > deadline:
            return False
    return False


def _end(process: subprocess.Popen[str]) -> None:
    """End the tuner with its builders and runners."""
    try:
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    except psutil.NoSuchProcess:
        family = []
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _drop_torn_records(path: Path) -> int:
    """Keep whole lines only: TVM aborts on a record that was being written when the process ended."""
    whole = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            json.loads(line)
        except json.JSONDecodeError:
            break
        whole.append(line)
    path.write_text("".join(f"{line}\n" for line in whole))
    return len(whole)


def main(arguments: list[str]) -> int:
    """Tune until ended from outside, or until MetaSchedule gives up by itself."""
    import tvm
    from tvm.s_tir import meta_schedule as ms

    folder, target = Path(arguments[0]), tvm.target.Target(json.loads(arguments[1]))
    mod = tvm.ir.load_json((folder / "module.json").read_text())
    tasks, weights = ms.relax_integration.extracted_tasks_to_tune_contexts(
        ms.relax_integration.extract_tasks(mod, target), str(folder), num_threads=1
    )
    build: Any = None
    if target.kind.name == "cuda":
        import tvm.s_tir.tensor_intrin  # what its rules for tensor cores name

        build = import_module("mlc.bench.metaschedule").build_cuda  # workers cannot import it from `__main__`
    builder = ms.builder.LocalBuilder(timeout_sec=_BUILD_TIMEOUT, f_build=build)
    runner = ms.runner.LocalRunner(timeout_sec=_BUILD_TIMEOUT)
    print("ready", flush=True)
    ms.tune.tune_tasks(
        tasks=tasks, task_weights=weights, work_dir=str(folder), max_trials_global=1 << 30, builder=builder,
        runner=runner, num_trials_per_iter=16,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
