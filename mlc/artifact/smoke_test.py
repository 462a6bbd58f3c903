"""Run a new artifact once, in a process of its own, before it counts as built: code that crashes is caught here.

``python -m mlc.artifact.smoke_test MODEL.so TARGET`` runs an artifact's code for a target once on random inputs.
Starting a process takes a second, so only the commands do this; :func:`mlc.compile` returns a module that has not run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np

from mlc import subprocesses
from mlc.artifact.executable import Bundle, Executable, check_machine, load
from mlc.errors import ArtifactError, MlcError
from mlc.frontend.model import TensorSpec

__all__ = ["main", "sample_input", "save_tested"]

#: seconds after which a first run is given up
_PATIENCE = 120.0


def save_tested(exe: Executable, output: Path, *, native: bool = True) -> bool:
    """Write an artifact; for this machine's CPU only after it has run once. Returns whether it has, of a bundle whether
    all have that can run here.

    What ``native`` code asks of the CPU must be there; code for other targets that this machine cannot run is written
    untried. Raises :class:`ArtifactError` where the run fails: ``output`` then stays as it was.
    """
    variants = exe.variants if isinstance(exe, Bundle) else (exe,)
    runnable = [variant for variant in variants if _runs_here(variant, native)]
    if not runnable:
        exe.save(output)
        return False
    part = output.with_name(f".{output.stem}.{os.getpid()}.so")
    try:
        exe.save(part)
        tried = all([_tried(part, variant) for variant in runnable])
        os.replace(part, output)
    except ArtifactError as error:
        raise ArtifactError(str(error).replace(str(part), str(output))) from error
    finally:
        part.unlink(missing_ok=True)
    return tried


def _runs_here(exe: Executable, native: bool) -> bool:
    if exe.metadata["kind"] != "llvm":
        return False
    try:
        check_machine(exe.metadata)
    except ArtifactError:
        if native:
            raise
        return False
    return True


def _tried(path: Path, exe: Executable) -> bool:
    """Run the file in another process; whether that has ended in time."""
    name, target = exe.metadata["name"], exe.metadata["target"]
    try:
        done = subprocess.run(subprocesses.command("mlc.artifact.smoke_test", str(path), target), capture_output=True,
                              text=True, errors="replace", check=False, timeout=_PATIENCE,
                              env=subprocesses.environment())
    except subprocess.TimeoutExpired:
        warnings.warn(f"{name} has not ended its first run after {_PATIENCE:.0f} s, so nothing says that it works",
                      stacklevel=2)
        return False
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise ArtifactError(f"{name} was built for {target} and must run once here, but "
                            + (_killed(-done.returncode) if done.returncode < 0 else lines[-1].strip()))
    return True


def _killed(number: int) -> str:
    end = f"its process ended with {signal.Signals(number).name}"
    if number == signal.SIGILL:
        return (f"{end}: it has instructions that this CPU lacks; compile for an older level such as --target "
                "x86-64-v3, and look at `mlc doctor`")
    if number == signal.SIGKILL:
        return f"{end}, most likely since memory ran out; free some and compile again"
    return f"{end}: the code or TVM is broken here; look at `mlc doctor`, and report it"


def sample_input(rng: np.random.Generator, spec: TensorSpec) -> np.ndarray:
    """Random values of an input; integers are 0, an index that is valid whatever it counts."""
    if spec.dtype.startswith(("float", "bfloat")):
        return rng.standard_normal(spec.sized()).astype(spec.dtype)
    return np.zeros(spec.sized(), spec.dtype)


def main(arguments: list[str]) -> int:
    """Run an artifact once; 1 with a line on standard error where that raises."""
    try:
        exe = load(arguments[0], verify=False, target=arguments[1])  # whoever has built it has the weights in memory
        rng = np.random.default_rng(0)
        exe(*(sample_input(rng, spec) for spec in exe.inputs))
    except MlcError as error:
        print(error, file=sys.stderr)
    except Exception as error:
        print(f"it raised {type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
    else:
        return 0
    return 1


if __name__ == "__main__":
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # tvm_ffi would import it, for nothing
    sys.stdout.flush()
    os._exit(main(sys.argv[1:]))  # nothing of what the model left behind need be taken down
