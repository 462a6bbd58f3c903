"""``--precision``: what it takes, and what it costs in exactness."""

from __future__ import annotations

import argparse
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
                        help="what float32 operands may be rounded to: bf16 multiplies bfloat16 and adds up float32, "
                             "f16 rounds weights alone on CPUs, to half their bytes, and both operands on GPUs, whose "
                             "tensor cores have tf32 too (default: f32)")


def other(args: argparse.Namespace) -> str:
    """--precision where it is not that of float32; else empty."""
    return "" if args.precision == "f32" else str(args.precision)


def words(args: argparse.Namespace) -> list[str]:
    """--precision as it was given, for another command line."""
    return ["--precision", other(args)] if other(args) else []


def facts(
    args: argparse.Namespace, model: ModelArgument, target: str | Target, exe: Executable | None
) -> dict[str, Any]:
    """What a document says of the precision: its name, and how far the outputs are from those of float32 on random
    inputs, relative to the largest magnitude of each output, where ``exe`` can run here (None: it cannot)."""
    if args.precision == "f32":
        return {"precision": args.precision}
    return {"precision": args.precision, "max_rel_err": None if exe is None else _error(args, model, target, exe)}


def _error(args: argparse.Namespace, model: ModelArgument, target: str | Target, exe: Executable) -> float | None:
    from mlc import api
    from mlc.bench.run import output_error
    from mlc.networks.inputs import random_inputs

    exact = api.compile(model.source(), target=target, log=args.log, shapes=options.shapes(args),
                        winograd=args.winograd, substitutions=args.substitutions, integers=args.integers)
    inputs = random_inputs(exe.inputs)
    (_, relative), wrong = output_error(exe(**inputs), exact(**inputs))
    return None if wrong else relative


def line(document: dict[str, Any]) -> str:
    """The same for people."""
    error = document["max_rel_err"]
    known = "unknown, since it has not run here" if error is None else f"{error:.2g} of the largest output"
    return f"precision {document['precision']}: error against f32 on random inputs {known}"
