"""``make demo``: tunes, compiles and compares a network, step by step (``python -m mlc.cli.demo``).

SqueezeNet with seeded random weights is compiled untuned, tuned for a while, compiled again, checked against
onnxruntime and timed side by side with it and with OpenVINO.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlc.cli import options
from mlc.cli.main import finish
from mlc.cli.outcome import Outcome
from mlc.errors import BuildError

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["demo", "main"]

#: largest error that counts as the same result, against the largest magnitude of the reference
TOLERANCE = 1e-3


def main(argv: Sequence[str] | None = None) -> int:
    """Parse and run; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m mlc.cli.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="light:squeezenet", help="a built-in network or an ONNX file")
    options.add_target(parser)
    parser.add_argument("--seconds", type=options.positive_float, default=120.0, help="how long to tune (default: 120)")
    parser.add_argument("--directory", type=Path, default=Path("build/demo"), help="where the files go")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    args = parser.parse_args(argv)
    return finish(lambda: demo(args.model, args.seconds, args.directory, args.target), as_json=args.json)


def demo(name: str, seconds: float, directory: Path, target: str = "native") -> Outcome:
    """Everything, told on standard error; the outcome is the table. Raises :class:`BuildError` for a wrong result and
    :class:`mlc.errors.MeasureError` where no candidate worked."""
    from mlc.bench import EngineSpec, Timing, run_bench
    from mlc.cli import bench
    from mlc.cli.models import find_model
    from mlc.installation import check_pins
    from mlc.report.console import stderr_console

    check_pins()
    started = time.monotonic()
    console = stderr_console()
    directory.mkdir(parents=True, exist_ok=True)
    model = find_model(name)
    onnx_path = _write_model(model, directory)
    _say(console, started, f"{onnx_path} ({onnx_path.stat().st_size / 1e6:.1f} MB)")
    untuned, tuned, log = (directory / f"{model.stem}{end}" for end in ("-untuned.so", ".so", ".db"))
    _compile(console, started, onnx_path, untuned, target, log=False)
    _tune(console, started, onnx_path, target, log, seconds)
    _compile(console, started, onnx_path, tuned, target, log=log)
    error = _check(onnx_path, tuned)
    _say(console, started, f"loaded {tuned}; largest difference from onnxruntime: {error:.1e} of the largest output")
    _say(console, started, "timing four engines in turn ...")
    engines = [EngineSpec("mlc", "mlc, tuned", str(tuned)), EngineSpec("mlc-untuned", "mlc, untuned", str(untuned)),
               EngineSpec("onnxruntime"), EngineSpec("openvino")]
    with bench.progress(console) as on_event:
        result = run_bench(onnx_path, engines, timing=Timing(), name=model.stem, on_event=on_event)
    _say(console, started, "done")
    return Outcome(result.to_json(), lambda out: bench.render_result(result, out),
                   exit_code=1 if any(row.error for row in result.results) else 0)


def _write_model(model: Any, directory: Path) -> Path:
    """The model as a file, which every engine reads for itself."""
    if model.path is not None:
        return Path(model.path)
    import onnx

    path = directory / f"{model.stem}.onnx"
    onnx.save(model.source(), path)
    return path


def _compile(console: Console, started: float, source: Path, output: Path, target: str, log: Path | bool) -> None:
    from mlc import api
    from mlc.artifact.smoke_test import save_tested

    before = time.monotonic()
    save_tested(api.compile(source, target=target, log=log, values={}), output, native=target == "native")
    _say(console, started, f"built {output} in {time.monotonic() - before:.1f} s")


def _tune(console: Console, started: float, source: Path, target: str, log: Path, seconds: float) -> None:
    from mlc import api
    from mlc.cli.tune import refuse_nothing
    from mlc.report import format as fmt
    from mlc.report.progress import listening

    _say(console, started, f"tuning for {fmt.duration(seconds)} into {log}; Ctrl-C stops early and keeps all")
    with listening(console) as listener:
        report = api.tune(source, target=target, seconds=seconds, log=log, on_event=listener)
    refuse_nothing(report, log)
    _say(console, started, f"{report.trials} trials in {fmt.duration(report.seconds)}; functions together "
                           f"{fmt.seconds(report.default_latency)} untuned, {fmt.seconds(report.best_latency)} tuned")


def _check(onnx_path: Path, artifact: Path) -> float:
    """Largest error of the artifact against onnxruntime on seeded random inputs, relative to the largest output."""
    import numpy as np
    import onnxruntime

    from mlc import api
    from mlc.bench.run import output_error
    from mlc.networks.inputs import random_inputs

    exe = api.load(artifact)
    inputs: dict[str, np.ndarray] = random_inputs(exe.inputs, seed=1)
    session = onnxruntime.InferenceSession(str(onnx_path), providers=["CPUExecutionProvider"])
    (_, relative), why = output_error(exe(*inputs.values()), session.run(None, inputs))
    if why or relative > TOLERANCE:
        found = why or f"{relative:.1e}"
        raise BuildError(f"the tuned model must agree with onnxruntime to {TOLERANCE}, got {found}; please report it")
    return relative


def _say(console: Console, started: float, text: str) -> None:
    from mlc.report import format as fmt

    console.print(f"[{fmt.duration(time.monotonic() - started)}] {text}", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
