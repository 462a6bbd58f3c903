"""The option ``--precision``, and the error that it causes in a model's outputs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from mlc.cli import options
from mlc.options import PRECISIONS

if TYPE_CHECKING:
    from mlc.artifact import Executable
    from mlc.cli.models import ModelArgument
    from mlc.target import Target

__all__ = ["add_precision", "facts", "line", "other", "words"]


def add_precision(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--precision", choices=PRECISIONS, default="f32",
                        help="what operands of float32 products may be rounded to; sums stay float32. f16: on CPUs "
                             "only weights are rounded, and take half the bytes. tf32: on GPUs only (default: f32, "
                             "nothing is rounded)")


def other(args: argparse.Namespace) -> str:
    """--precision where it is not that of float32; else empty."""
    return "" if args.precision == "f32" else str(args.precision)


def words(args: argparse.Namespace) -> list[str]:
    """--precision as it was given, for another command line."""
    return ["--precision", other(args)] if other(args) else []


def facts(
    args: argparse.Namespace, model: ModelArgument, target: str | Target, exe: Executable | None, *, wait: bool = True
) -> dict[str, Any]:
    """What a document says of the precision: its name, and how far the outputs are from those of float32 on random
    inputs, relative to the largest magnitude of each output.

    ``exe`` says so where it can run here. Where it cannot (None), this machine's CPU computes what a GPU would, if
    there is the time to ``wait`` for it; of another CPU nothing is known.
    """
    if args.precision == "f32":
        return {"precision": args.precision}
    error = _error(args, model, target, exe) if exe is not None else None
    if exe is None and wait:
        error = _without_gpu(args, model, target)
    source = {} if error is None else {"max_rel_err_from": "run" if exe is not None else "cpu"}
    return {"precision": args.precision, "max_rel_err": error, **source}


def _without_gpu(args: argparse.Namespace, model: ModelArgument, target: str | Target) -> float | None:
    """The error of what a GPU computes, by this machine's CPU; None where the target is none, or the CPU has no
    schedule for a function of the GPU's."""
    from mlc.compilation import Compilation
    from mlc.log import layered
    from mlc.report.building import building
    from mlc.report.console import stderr_console
    from mlc.shapes import usual
    from mlc.target import several

    gpu = next((each for each in several(target) if each.kind == "cuda"), None)
    if gpu is None:
        return None
    try:
        compiled = partial(Compilation.of, model.source(), gpu, values=options.values(args), winograd=args.winograd,
                           substitutions=args.substitutions, precision=args.precision, integers=args.integers)
        compilation, shapes = compiled(shapes=options.shapes(args)), None
        if any(spec.free for spec in compilation.model.inputs):
            # at the sizes that it is run with anyhow: TVM's code for CPUs has no bfloat16 between free sizes (0.27)
            shapes = {spec.name: usual(spec.shape) for spec in compilation.model.inputs}
            compilation = compiled(shapes=shapes)
        doing = f"compiling {model.stem} for this CPU, with the GPU's rounding"
        with layered(args.log, gpu) as log, building(stderr_console(), doing):
            exe = compilation.stand_in(log)
        return _error(args, model, "native", exe, log=False, shapes=shapes)
    except Exception:  # whatever TVM raises: a figure for the report is not worth a build
        return None


def _error(
    args: argparse.Namespace, model: ModelArgument, target: str | Target, exe: Executable,
    log: str | bool | None = None, shapes: Mapping[str, Any] | None = None,
) -> float | None:
    from mlc import api
    from mlc.bench.run import output_error
    from mlc.networks.inputs import random_inputs
    from mlc.report.building import building
    from mlc.report.console import stderr_console

    with building(stderr_console(), f"compiling {model.stem} in float32 to compare with"):
        exact = api.compile(model.source(), target=target, log=args.log if log is None else log,
                            shapes=options.shapes(args) if shapes is None else shapes, values=options.values(args),
                            winograd=args.winograd, substitutions=args.substitutions, integers=args.integers)
    with building(stderr_console(), f"running {model.stem} in {args.precision} and in float32"):
        inputs = random_inputs(exe.inputs)
        (_, relative), wrong = output_error(exe(**inputs), exact(**inputs))
    return None if wrong else relative


def line(document: dict[str, Any]) -> str:
    """:func:`facts` as a line of text."""
    error = document["max_rel_err"]
    known = "unknown, since it has not run here" if error is None else f"{error:.2g} of the largest output"
    by = ", as this CPU computes it with the GPU's rounding" if document.get("max_rel_err_from") == "cpu" else ""
    return f"precision {document['precision']}: error against f32 on random inputs {known}{by}"
