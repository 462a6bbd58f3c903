"""Options that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlc.errors import UsageError
from mlc.shapes import Free, Range, parse_shapes, to_json

if TYPE_CHECKING:
    from mlc.cli.outcome import Outcome
    from mlc.frontend.model import TensorSpec

__all__ = [
    "MODELS_EPILOG", "Action", "actions", "add_integers", "add_log", "add_model", "add_shape", "add_size",
    "add_substitutions", "add_target", "add_threads", "add_value", "add_winograd", "check_folder", "non_negative_int",
    "positive_float", "positive_int", "shape_words", "shapes", "sizes", "specs", "values",
]

MODELS_EPILOG = """models:
  a file           anything.onnx
  light:NAME       a network of the onnx package with seeded random weights: squeezenet, resnet50, vgg19, ...
  resnet50-b8      that network at batch 8
  bert-base, gpt2-small    from transformers configurations with seeded random weights, 128 tokens
  mobilenet-v2, vit-tiny   exported from PyTorch with seeded random weights, images of 224 x 224 pixels
"""


#: declares a sub-command by its name, its help and what runs it
Action = Callable[[str, str, Callable[[argparse.Namespace], "Outcome"]], argparse.ArgumentParser]


def actions(parser: argparse.ArgumentParser) -> Action:
    """The sub-commands of a command: each call of the result adds one, whose ``run`` the command is to call."""
    group = parser.add_subparsers(dest="action", metavar="ACTION", title="actions", required=True)

    def action(name: str, help: str, run: Callable[[argparse.Namespace], Outcome]) -> argparse.ArgumentParser:
        sub = group.add_parser(name, help=help, description=help, allow_abbrev=False)
        sub.set_defaults(run=run)
        return sub

    return action


def positive_int(text: str) -> int:
    """An argparse type: 1, 2, 3, ..."""
    value = _number(int, text, "a whole number")
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def non_negative_int(text: str) -> int:
    """An argparse type: 0, 1, 2, ..."""
    value = _number(int, text, "a whole number")
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {text}")
    return value


def positive_float(text: str) -> float:
    """An argparse type: a finite number above 0."""
    value = _number(float, text, "a number")
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a finite number above 0, got {text}")
    return value


def add_model(parser: argparse.ArgumentParser, what: str = "an ONNX file") -> None:
    parser.add_argument("model", metavar="MODEL", help=f"{what}, or the name of a built-in model (below)")


def add_target(parser: argparse.ArgumentParser, what: str = "what to build for") -> None:
    parser.add_argument("--target", default="native", metavar="T",
                        help=f"{what}; `mlc targets` lists the names (default: native, this CPU)")


def add_log(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--log", metavar="FILE",
                        help="the tuning log (default: your own for the target, read over the shipped one)")


def add_shape(parser: argparse.ArgumentParser, what: str = "sizes or ranges of sizes of an input") -> None:
    parser.add_argument("--shape", action="append", default=[], metavar="NAME=1..32,3,224,224", dest="shapes",
                        help=f"{what}; repeat for each input (default: 1..512 for each free dimension)")


def add_value(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--value", action="append", default=[], metavar="NAME=2,3", dest="values",
                        help="make an input a constant with this value, as is required for inputs that decide shapes "
                             "(the sizes of a Reshape, say); repeat for each input")


def values(args: argparse.Namespace) -> dict[str, list[float]]:
    """Parse --value; raises :class:`UsageError`."""
    found: dict[str, list[float]] = {}
    for word in args.values:
        name, equals, text = word.rpartition("=")
        try:
            numbers = [float(n) if "." in n or "e" in n else int(n) for n in text.split(",") if n]
        except ValueError:
            numbers, equals = [], ""
        if not equals or not name:
            raise UsageError(f"--value must look like NAME=2,3, got {word!r}")
        if name in found:
            raise UsageError(f"each value must be given once, but --value {name}=... came twice")
        found[name] = list(numbers)
    return found


def add_size(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", action="append", default=[], metavar="NAME=N", dest="sizes",
                        help="a free size of the random inputs, by name; repeat for each (default: the usual size)")


def sizes(args: argparse.Namespace, inputs: Iterable[TensorSpec]) -> dict[str, int]:
    """Parse --size, given the free sizes of ``inputs``; raises :class:`UsageError`."""
    free = {size.name: size for spec in inputs for size in spec.shape if isinstance(size, Free)}
    found: dict[str, int] = {}
    for word in args.sizes:
        name, equals, text = word.rpartition("=")
        if not equals or not text.isdecimal():
            raise UsageError(f"--size must look like NAME=N, got {word!r}")
        if name not in free:
            known = ", ".join(free) or "none: every size is fixed"
            raise UsageError(f"--size must name a free size of the model ({known}), got {name}")
        if name in found:
            raise UsageError(f"each free size must be given once, but --size {name}=... came twice")
        if int(text) not in free[name].range:
            raise UsageError(f"{name} must be one of {free[name].range}, got {text}; compile the model again for a "
                             "range that has it")
        found[name] = int(text)
    return found


def shapes(args: argparse.Namespace) -> dict[str, tuple[Range, ...]] | None:
    """Parse --shape, None if it was not given; raises :class:`UsageError`."""
    return parse_shapes(args.shapes) or None


def shape_words(args: argparse.Namespace) -> list[str]:
    """--shape and --value as they were given, for another command line."""
    return [word for option, given in (("--shape", args.shapes), ("--value", args.values))
            for text in given for word in (option, text)]


def add_winograd(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-winograd", dest="winograd", action="store_false", default=None,
                        help="no convolution by Winograd's algorithm, which rounds more (same as MLC_WINOGRAD=0)")


def add_substitutions(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--substitutions", action=argparse.BooleanOptionalAction, default=None,
                        help="allow or forbid proved rules to replace the model's graph by a faster one (default: "
                             "allow, unless MLC_SUBSTITUTIONS=0)")


def add_integers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-integers", dest="integers", action="store_false", default=None,
                        help="compute products of quantised operands in float32, as the model spells them (default: in "
                             "integers where that is estimated to be faster, unless MLC_INTEGERS=0)")


def add_threads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=positive_int, metavar="N",
                        help="CPU threads (default: the physical cores that this process may use)")


def _number(kind: type, text: str, what: str):  # type: ignore[no-untyped-def]
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be {what}, got {text!r}") from None


def check_folder(output: Path) -> None:
    """Refuse an output file whose folder isn't there before minutes are spent; raises :class:`UsageError`."""
    if output.is_dir():
        raise UsageError(f"the output must be a file, but {output} is a folder; add a file name")
    if not output.parent.is_dir():
        folder = output.parent
        raise UsageError(f"the output's folder must exist, but {folder} does not; run `mkdir -p {folder}`")


def specs(tensors: Iterable[TensorSpec]) -> list[dict[str, Any]]:
    """Names, shapes and types as a document."""
    return [{"name": t.name, "shape": to_json(t.shape), "dtype": t.dtype} for t in tensors]
