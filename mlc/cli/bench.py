"""``mlc bench``: the compiled model against other engines, interleaved, at the same thread count."""

from __future__ import annotations

import argparse
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlc.cli import options, precision
from mlc.cli.outcome import Command, Outcome
from mlc.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    import onnx
    from rich.console import Console

    from mlc.artifact import Executable
    from mlc.bench import BenchEvent, BenchResult, EngineSpec
    from mlc.cli.models import ModelArgument

__all__ = ["COMMAND", "progress", "render_result"]

_PEERS = ("onnxruntime", "openvino")  # of an .onnx model where --against is left out and they are installed
_ASKED = {"openvino": ("bf16",)}  # what other engines can be asked to round operands to, as --precision has it
_EPILOG = f"""--target and --precision are what mlc builds with. The other engines run with their defaults on this
machine, except that openvino is asked for bf16 too.

engines for --against:
  onnxruntime, openvino    on the ONNX model
  torch-eager, torch-compile (torch: both)    on an exported PyTorch program, MODEL.pt2
  tvm, tvm-metaschedule    TVM untuned, and after --seconds of its own tuner
  mlc-untuned              mlc without any log

{options.MODELS_EPILOG}"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser, "an ONNX file or a compiled .so")
    parser.add_argument("--against", metavar="ENGINES",
                        help="comma-separated engines (default: onnxruntime,openvino, if installed)")
    parser.add_argument("--onnx", type=Path, metavar="FILE",
                        help="the model that MODEL.so was built from, for the other engines")
    options.add_target(parser)
    options.add_threads(parser)
    options.add_log(parser)
    options.add_shape(parser)
    options.add_value(parser)
    options.add_size(parser)
    options.add_winograd(parser)
    options.add_substitutions(parser)
    precision.add_precision(parser)
    parser.add_argument("--seconds", type=options.positive_float, metavar="S", help="tuning budget of tvm-metaschedule")
    parser.add_argument("--rounds", type=options.positive_int, default=12, metavar="N",
                        help="rounds in which every engine has its turn (default: 12)")
    parser.add_argument("--tasks", action="store_true",
                        help="instead of comparing engines, show the time of each of the model's functions and its "
                             "fraction of the roofline (at the usual sizes)")


def _execute(args: argparse.Namespace) -> Outcome:
    from mlc.bench import Timing, run_bench
    from mlc.cli.models import find_model
    from mlc.report.console import stderr_console

    model = find_model(args.model)
    if model.is_artifact and args.target != "native":
        raise UsageError(f"{args.model} is built already, for the target that it names; leave --target out, or give "
                         "the model")
    if model.is_artifact and args.precision != "f32":
        raise UsageError(f"{args.model} is built already, with the precision that it has; leave --precision out, or "
                         "give the model")
    if args.tasks:
        return _tasks(args, model)
    if args.onnx and not model.is_artifact:
        raise UsageError("--onnx goes with a compiled MODEL.so; an ONNX file is MODEL itself")
    source = find_model(str(args.onnx)).source() if args.onnx else _source(args, model)
    engines = _engines(args, model)
    with tempfile.TemporaryDirectory(prefix="mlc-bench-") as folder, progress(stderr_console()) as on_event:
        specs = [_spec(engine, model, args, Path(folder)) for engine in engines]
        inputs = _inputs(args, specs)
        result = run_bench(source, specs, threads=_threads(args), timing=Timing(rounds=args.rounds),
                           name=model.stem, on_event=on_event, inputs=inputs,
                           reference=_reference(args, model, specs, inputs))
    failed = any(row.error for row in result.results)
    return Outcome(result.to_json(), lambda console: render_result(result, console), exit_code=1 if failed else 0)


def _tasks(args: argparse.Namespace, model: ModelArgument) -> Outcome:
    """Each function timed where it runs, between the others: inputs are as warm and weights as cold as they are.

    What functions compute is known for the usual sizes; at others neither operations nor rooflines are given.
    """
    from statistics import median

    from mlc import api
    from mlc.networks.inputs import random_inputs
    from mlc.shapes import usual

    if args.against or args.onnx:
        raise UsageError("--tasks looks at mlc alone; leave --against and --onnx out")
    if model.is_artifact:
        exe = api.load(str(model.path))
    else:
        with tempfile.TemporaryDirectory(prefix="mlc-bench-") as folder:
            exe = api.load(_compiled(args, model, Path(folder, "mlc.so"), args.log))
    sizes = options.sizes(args, exe.inputs)
    inputs = list(random_inputs(exe.inputs, sizes=sizes).values())  # by position: names may be those of options
    seconds = exe.profile(*inputs, repeats=args.rounds)
    whole = median(exe.time(*inputs, repeats=4 * args.rounds, warmup=4))
    as_usual = all(usual(spec.shape, sizes) == usual(spec.shape) for spec in exe.inputs)
    rows = [
        {"task": f["name"], "calls": f["calls"], "seconds": seconds[f["symbol"]] / f["calls"],
         "flops": f["flops"] if as_usual else 0.0, "roofline_seconds": f["roofline_seconds"] if as_usual else 0.0,
         "space": f["space"], "source": f["source"],
         "decisions": f["decisions"], "key": f["key"], "nodes": f.get("origins", [])}
        for f in exe.metadata["functions"]
    ]
    rows.sort(key=lambda row: -row["calls"] * row["seconds"])
    document = {"model": model.stem, "threads": exe.metadata["threads"], "median_ms": whole * 1e3, "tasks": rows}
    return Outcome(document, lambda console: _render_tasks(document, console))


def _render_tasks(document: dict[str, Any], console: Console) -> None:
    from mlc.report import format as fmt
    from mlc.report.tables import functions_table

    rows = document["tasks"]
    together = sum(row["calls"] * row["seconds"] for row in rows)
    console.print(functions_table(rows))
    console.print(f"{document['model']} on {document['threads']} threads: {fmt.seconds(document['median_ms'] / 1e3)}; "
                  f"its functions together {fmt.seconds(together)}, watched", soft_wrap=True)


def _threads(args: argparse.Namespace) -> int:
    from mlc.config import physical_cores

    return int(args.threads or physical_cores())


def _engines(args: argparse.Namespace, model: ModelArgument) -> list[str]:
    """``mlc`` first, then what was asked for; raises :class:`UsageError` for an unknown name."""
    from mlc.bench import expand
    from mlc.installation import installed

    if args.against is None:
        wanted = [] if model.is_artifact and not args.onnx else [peer for peer in _PEERS if installed(peer)]
    else:
        wanted = [word.strip() for word in args.against.split(",") if word.strip()]
    names = [spec.kind for spec in expand(wanted)] if wanted else []
    if "tvm-metaschedule" in names and args.seconds is None:
        raise UsageError("tvm-metaschedule needs a tuning budget; give --seconds S")
    return ["mlc", *(name for name in names if name != "mlc")]


def _spec(engine: str, model: ModelArgument, args: argparse.Namespace, folder: Path) -> EngineSpec:
    """Compile for our own engines; the others load the model themselves."""
    from mlc.bench import EngineSpec

    if engine == "mlc" and model.is_artifact:
        return EngineSpec("mlc", artifact=str(model.path))
    if engine in ("mlc", "mlc-untuned"):
        path = _compiled(args, model, folder / f"{engine}.so", args.log if engine == "mlc" else False)
        return EngineSpec(engine, artifact=str(path), precision=precision.other(args))
    asked = args.precision if args.precision in _ASKED.get(engine, ()) else ""
    return EngineSpec(engine, seconds=args.seconds or 0.0, precision=asked)


def _reference(
    args: argparse.Namespace, model: ModelArgument, specs: list[EngineSpec], inputs: dict[str, np.ndarray] | None
) -> list[np.ndarray] | None:
    """Outputs that mlc computes in float32, if every engine may round; None if one does not."""
    if any(not spec.precision for spec in specs):
        return None
    assert inputs is not None
    return list(_build(args, model, False, "f32")(**inputs))


def _inputs(args: argparse.Namespace, specs: list[EngineSpec]) -> dict[str, np.ndarray] | None:
    """Random inputs of the sizes that were asked for; None where the usual ones do and nothing else reads them."""
    from mlc.artifact import artifact
    from mlc.frontend.model import TensorSpec
    from mlc.networks.inputs import random_inputs
    from mlc.shapes import from_json

    if not args.sizes and not all(spec.precision for spec in specs):
        return None
    path = next(spec.artifact for spec in specs if spec.artifact)
    entries = artifact.read(Path(path)).metadata["inputs"]
    inputs = [TensorSpec(each["name"], from_json(each["shape"]), each["dtype"]) for each in entries]
    return random_inputs(inputs, sizes=options.sizes(args, inputs))


def _source(args: argparse.Namespace, model: ModelArgument) -> Path | onnx.ModelProto:
    """The model for every engine, with what --value says as constants."""
    from mlc.frontend.onnx_file import read_model, whole
    from mlc.frontend.onnx_shape_inputs import with_values

    source, values = model.source(), options.values(args)
    if not values:
        return source
    return with_values(whole(read_model(source)) if isinstance(source, Path) else source, values, model.stem)


def _compiled(args: argparse.Namespace, model: ModelArgument, path: Path, log: str | bool | None) -> Path:
    from mlc.artifact.smoke_test import save_tested

    save_tested(_build(args, model, log, args.precision), path, native=args.target == "native")
    return path


def _build(args: argparse.Namespace, model: ModelArgument, log: str | bool | None, wanted: str) -> Executable:
    from mlc import api
    from mlc.target import resolve

    return api.compile(_source(args, model), target=resolve(args.target, _threads(args)), log=log, values={},
                       winograd=args.winograd, substitutions=args.substitutions, shapes=options.shapes(args),
                       precision=wanted)


@contextmanager
def progress(console: Console) -> Iterator[Callable[[BenchEvent], None]]:
    """A listener that tells of a benchmark's course: one changing line in a terminal, a line an engine elsewhere."""

    from mlc.report.building import steps

    status = console.status("preparing ...") if console.is_terminal else None

    def listener(event: BenchEvent) -> None:
        if event.kind == "failed":
            console.print(f"{event.engine}: {event.detail}", soft_wrap=True)
        elif event.kind == "loading" and status:
            status.update(f"loading {event.engine} ...")
        elif event.kind == "ready" and not status:
            console.print(f"{event.engine}: loaded in {event.seconds:.1f} s")
        elif event.kind == "round" and status:
            of = f" of {event.rounds}" if event.rounds else ""
            status.update(f"timing, round {event.round}{of} ...")

    if status is None:
        yield listener
        return
    with status, steps(lambda step: status.update(f"building: {step} ...")):
        yield listener


def render_result(result: BenchResult, console: Console) -> None:
    """The table and what it means."""
    from mlc.report import format as fmt
    from mlc.report.tables import bench_table

    console.print(bench_table([row.to_json() for row in result.results]))
    console.print(f"{result.model} on {result.machine}, {result.threads} threads each, interleaved; errors against "
                  f"{result.reference or 'nothing'}", soft_wrap=True)
    if result.target:
        console.print(f"mlc is built for {result.target}; the others run as they come", soft_wrap=True)
    for line in _rounding(result):
        console.print(line, soft_wrap=True)
    speedup = result.speedup_over_best_peer
    if speedup is not None:
        console.print(f"mlc against the best of the others: {fmt.factor(speedup)}")


def _rounding(result: BenchResult) -> list[str]:
    """Who was asked to round operands, and who was not."""
    asked = {row.engine: row.precision for row in result.results if row.precision}
    if not asked:
        return []
    rest = [row.engine for row in result.results if not row.precision]
    kind = next(iter(asked.values()))
    others = f"{', '.join(rest)}: as the model has it" if rest else "the reference: mlc without rounding"
    return [f"operands may be rounded to {kind}: {', '.join(asked)}; {others}"]


COMMAND = Command("bench", "compare with other engines", _add_arguments, _execute, epilog=_EPILOG)
