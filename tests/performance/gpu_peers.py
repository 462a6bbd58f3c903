"""TVM as it comes, on a GPU, for the benchmark of GPUs: its default schedules (dlight), and what MetaSchedule finds.

The compiler and its flags are those of mlc's own kernels. What multiplies on tensor cores is TVM's to decide: both know
them by an architecture's plain number alone, so code is made for ``sm_90`` where mlc has it for ``sm_90a``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlc.errors import BuildError, MlcError
from mlc.target import Target, resolve

if TYPE_CHECKING:
    import onnx

__all__ = ["build", "plain", "started", "tuned"]

#: makes tensor functions of a Relax module scheduled ones
Schedules = Callable[[Any, Target], Any]


def plain(target: Target) -> tuple[Target, list[str]]:
    """The target that TVM is given for ``target``, whose first architecture it is, and all architectures that machine
    code is made for; none for a CPU."""
    from mlc.codegen.cuda import architectures

    if target.kind != "cuda":
        return target, []
    archs = [arch.rstrip("af") for arch in architectures(target.tvm)]
    return resolve(f"cuda:{archs[0]}"), archs


def build(
    model: onnx.ModelProto, precision: str, target: Target, path: Path, schedules: Schedules | None = None
) -> None:
    """Save ``model`` as TVM compiles it, after ``schedules``, at ``path``; raises :class:`MlcError` in one line, of
    whatever TVM raises."""
    import tvm

    from mlc.codegen.cuda import machine_code

    known, archs = plain(target)
    try:
        mod = _module(model, precision)
        with machine_code(archs) if archs else nullcontext(), known.tvm as kind, tvm.transform.PassContext(
                config={"relax.backend.use_cuda_graph": bool(archs)}):
            mod = schedules(mod, known) if schedules else mod
            tvm.compile(mod, target=kind).export_library(str(path))
    except MlcError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines()
        raise BuildError(f"TVM must compile the model, but it did not ({lines[-1].strip() if lines else error!r}); "
                         "leave it out with --match") from error


def tuned(seconds: float) -> Schedules:
    """MetaSchedule with a budget; needs the device that is tuned for."""
    from mlc.bench import metaschedule

    def find(mod: Any, target: Target) -> Any:
        with tempfile.TemporaryDirectory(prefix="mlc-metaschedule-") as folder:
            return metaschedule.tuned(mod, target, Path(folder), seconds)

    return find


def _module(model: onnx.ModelProto, precision: str) -> Any:
    """As Relax, with products of float16 added up in float32 for ``f16``."""
    import tvm
    from tvm import relax

    from mlc.frontend import load_model
    from mlc.graph.lowering.recurrent import UnrollRecurrent

    if precision not in ("f32", "f16"):
        raise BuildError(f"TVM rounds to f16 alone, got {precision}; leave it out with --match")
    passes = [UnrollRecurrent, relax.transform.DecomposeOpsForInference()]
    if precision == "f16":
        passes.append(relax.transform.ToMixedPrecision(out_dtype="float32"))
    return tvm.transform.Sequential(passes)(load_model(model).mod)


def started(path: Path, inputs: Mapping[str, np.ndarray], on_gpu: bool) -> Callable[[], list[Any]]:
    """The model of ``path`` on inputs that are on its device: each call runs it, and gives tensors there without
    waiting for the end; raises :class:`MlcError` where it cannot be loaded."""
    import tvm
    from tvm import relax

    device = tvm.cuda(0) if on_gpu else tvm.cpu()
    try:
        machine = relax.VirtualMachine(tvm.runtime.load_module(str(path)), device)
    except Exception as error:
        reason = str(error).strip().splitlines()[-1:] or [repr(error)]
        raise BuildError(f"what TVM compiled must load, but {path.name} did not ({reason[0]}); remove it") from error
    main, tensors = machine["main"], [tvm.runtime.tensor(array, device) for array in inputs.values()]

    def call() -> list[Any]:
        result = main(*tensors)
        return [result] if isinstance(result, tvm.runtime.Tensor) else list(result)

    return call
