"""The checks of ``mlc doctor``. A check returns findings and never raises: a broken part is a finding."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlc.config import get, physical_cores, user_log_path
from mlc.cpu import HostCpu, cpu_model, host_cpu
from mlc.gpu import driver, gpus
from mlc.installation import installed, pins

__all__ = ["Finding", "cpu_findings", "examine"]

State = Literal["ok", "note", "wrong"]

#: seconds in which a device must answer
_DEVICES_SECONDS = 60.0
_PEERS = ("onnxruntime", "openvino", "torch", "transformers")


@dataclass(frozen=True)
class Finding:
    """One line of the diagnosis; ``remedy`` says what to do where something is wrong."""

    name: str
    state: State
    value: str
    remedy: str = ""


def examine(executor: str = "local") -> list[Finding]:
    """Every finding, in the order in which a reader wants them; ``executor`` is what ``mlc tune`` would be given."""
    findings: list[Finding] = []
    for probe in (_python, _packages, _clash):
        findings += _guarded(probe)
    if any(f.state == "wrong" for f in findings):
        return findings + [Finding("the rest", "note", "not looked at: importing TVM is unsafe until this is mended")]
    with _without_torch():
        findings += _guarded(_native)
    for probe in (_runs, _threads, _calibration, _linker, _cuda, _logs):
        findings += _guarded(probe)
    if executor != "local":
        findings += _executor(executor)
    return findings


def _executor(text: str) -> list[Finding]:
    """Whether the devices of a cluster or a tracker answer, and with what."""
    from mlc.errors import MlcError
    from mlc.measure.executors import fleet, parse

    address = parse(text)
    if address is None:
        return []
    try:
        devices = fleet(address, patience=_DEVICES_SECONDS)
    except MlcError as error:
        problem, _, remedy = str(error).partition("; ")
        return [Finding("executor", "wrong", problem, remedy)]
    try:
        return [Finding("device", "note" if status.state not in ("idle", "busy") else "ok",
                        f"{status.device}: {status.machine or status.state}") for status in devices.status()]
    finally:
        devices.close()


@contextlib.contextmanager
def _without_torch() -> Iterator[None]:
    """TVM imports PyTorch where it is installed, which takes a second and serves nobody here."""
    if "tvm" in sys.modules or "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # what the import system takes for "not there"
    try:
        import tvm  # noqa: F401

        yield
    finally:
        del sys.modules["torch"]


def _guarded(probe: Callable[[], Iterable[Finding]]) -> list[Finding]:
    try:
        return list(probe())
    except Exception as error:
        name = probe.__name__.strip("_")
        line = (str(error).strip().splitlines() or [""])[-1]
        return [Finding(name, "wrong", f"{type(error).__name__}: {line}", "reinstall mlc into a fresh environment")]


def _python() -> Iterator[Finding]:
    yield Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")


def _packages() -> Iterator[Finding]:
    yield Finding("mlc", "ok", installed("mlc") or "not installed")
    for pin in pins():
        if pin.ok:
            yield Finding(pin.package, "ok", pin.wanted)
        else:
            what = f"{pin.found or 'missing'}, where {pin.wanted} is needed"
            yield Finding(pin.package, "wrong", what, f"run `pip install {pin.package}=={pin.wanted}`")
    xgboost = installed("xgboost-cpu") or installed("xgboost")
    for name, version in (("xgboost", xgboost), ("onnx", installed("onnx")), ("numpy", installed("numpy"))):
        if version:
            yield Finding(name, "ok", version)
        else:
            package = "xgboost-cpu" if name == "xgboost" else name
            yield Finding(name, "wrong", "missing", f"run `pip install {package}`")
    peers = {peer: installed(peer) for peer in _PEERS}
    have = ", ".join(f"{peer} {version}" for peer, version in peers.items() if version)
    lack = ", ".join(peer for peer, version in peers.items() if not version)
    yield Finding("peers for mlc bench", "note", have + (f"{'; ' if have else ''}without {lack}" if lack else ""))


def _clash() -> Iterator[Finding]:
    other = installed("mlc-python")
    if other:
        yield Finding("module mlc", "wrong", f"mlc-python {other} installs a module of the same name",
                      "run `pip uninstall mlc-python`, then install mlc again")


def _native() -> Iterator[Finding]:
    from mlc.target import resolve

    target = resolve("native")
    import tvm

    yield Finding("llvm", "ok", f"{tvm.target.codegen.llvm_version_major()}")
    yield Finding("target native", "ok", f"{target.canonical} ({cpu_model()})")
    yield from cpu_findings({str(f) for f in tvm.target.codegen.llvm_get_cpu_features(target.tvm)}, host_cpu())


def cpu_findings(features: set[str], cpu: HostCpu) -> Iterator[Finding]:
    """Compare the features that code for this machine uses (LLVM's names) with those that its CPU reports."""
    if lacking := cpu.hidden(features):
        yield Finding(
            "cpu features", "wrong", f"code would use {', '.join(lacking)}, which this (virtual) machine hides",
            "use --target x86-64-v3 or a level below what is hidden, and report the CPU's model",
        )
        return
    widest = next((v for v in ("avx512f", "avx2", "avx", "sse4.2", "sve", "neon") if v in features), "the baseline")
    value = f"all that code uses are there, up to {widest}"
    if cpu.flags is None:
        value += "; the CPU was asked, since the kernel lists none"
    yield Finding("cpu features", "ok", value)


def _runs() -> Iterator[Finding]:
    """Build a small function for the native target and run it in a forked process, which may die of it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if _native_sum() else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        yield Finding("native code", "wrong", f"a compiled function was stopped by {name}",
                      "build with --target x86-64-v3, and report the CPU's model")
    elif os.WEXITSTATUS(status):
        wrong = "computed a wrong result" if os.WEXITSTATUS(status) == 2 else "could not be built"
        yield Finding("native code", "wrong", f"a small function {wrong}", "reinstall mlc into a fresh environment")
    else:
        yield Finding("native code", "ok", "a compiled function ran and was right")


def _native_sum() -> bool:
    import numpy as np
    import tvm
    from tvm import te

    from mlc.target import resolve

    a, b = te.placeholder((1027,), name="a"), te.placeholder((1027,), name="b")
    c = te.compute((1027,), lambda i: a[i] * b[i] + a[i], name="c")
    built = tvm.compile(te.create_prim_func([a, b, c]), target=resolve("native").tvm)
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 1027), dtype="float32")
    out = tvm.runtime.tensor(np.zeros(1027, "float32"))
    built(tvm.runtime.tensor(x), tvm.runtime.tensor(y), out)
    return bool(np.allclose(out.numpy(), x * y + x, rtol=1e-5, atol=1e-6))


def _threads() -> Iterator[Finding]:
    import tvm_ffi

    default = int(tvm_ffi.get_global_func("runtime.NumThreads")())
    cores = physical_cores()
    source = "MLC_THREADS" if get("MLC_THREADS") else "physical cores"
    yield Finding("threads", "ok", f"{cores} ({source}); TVM by itself would use {default} of {os.cpu_count()} CPUs")


def _calibration() -> Iterator[Finding]:
    from mlc.calibration import calibration_path, read

    found, reason = read()
    if reason:
        yield Finding("calibration", "wrong", reason, "or delete the file")
    elif found is None:
        yield Finding("calibration", "note", "none: `mlc doctor --calibrate` measures this machine in a few seconds")
    else:
        yield Finding("calibration", "ok", f"{found.text()} in {calibration_path()}")


def _linker() -> Iterator[Finding]:
    found = next((name for name in (os.environ.get("CXX"), "g++", "gcc", "clang") if name and shutil.which(name)), None)
    if found:
        yield Finding("linker", "ok", str(shutil.which(found)))
    else:
        yield Finding("linker", "wrong", "no g++, gcc or clang on the PATH", "install g++: it links the artifacts")


def _cuda() -> Iterator[Finding]:
    nvcc = shutil.which(get("MLC_NVCC"))
    if nvcc:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=5, check=False).stdout
        release = next((part.strip() for part in text.split(",") if part.strip().startswith("release")), "?")
        yield Finding("nvcc", "ok", f"{release} at {nvcc}")
    else:
        yield Finding("nvcc", "note", f"no {get('MLC_NVCC')} on the PATH: models can't be built for cuda targets")
    library = driver()
    if library is None:
        yield Finding("cuda driver", "note", "none: code for cuda targets can be built, but not run here")
        return
    version = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    found = ", ".join(f"{gpu.name} ({gpu.arch})" for gpu in gpus(library))
    release = f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    if found:
        yield Finding("cuda driver", "ok", f"{release}: {found}")
    else:
        yield Finding("cuda driver", "note", f"{release}, but no GPU answers")


def _logs() -> Iterator[Finding]:
    from mlc.target import resolve

    canonical = resolve("native").canonical
    path = user_log_path(canonical)
    folder = next(p for p in (path.parent, *path.parent.parents) if p.exists())
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        yield Finding("your log", "wrong", f"{path} can't be written", "set MLC_DATA_DIR to a folder of yours")
    elif path.exists():
        yield Finding("your log", "ok", f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
    else:
        yield Finding("your log", "ok", f"{path} (not written yet)")
    yield Finding("shipped logs", "note", ", ".join(_shipped()) or "none")


def _shipped() -> list[str]:
    import tuning_logs

    root = Path(next(iter(tuning_logs.__path__)))
    return sorted(str(p.relative_to(root)) for kind in ("*.db", "*.jsonl") for p in root.rglob(kind))
