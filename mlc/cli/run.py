"""``mlc run``: run a compiled model on files or on seeded random inputs."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlc.cli import options
from mlc.cli.outcome import Command, Outcome
from mlc.errors import InputError, UsageError
from mlc.shapes import Free

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console

    from mlc.artifact import Executable

__all__ = ["COMMAND"]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL.so", help="a file that `mlc compile` wrote")
    parser.add_argument("--input", action="append", default=[], metavar="NAME=FILE.npy", dest="inputs",
                        help="an input's array; repeat for each input (default: seeded random values)")
    parser.add_argument("-o", "--output", type=Path, metavar="OUT.npz", help="write the outputs to this file, by name")
    parser.add_argument("--repeat", type=options.positive_int, metavar="N", help="run N times and print the latency")
    options.add_size(parser)
    parser.add_argument("--seed", type=options.non_negative_int, default=0, metavar="K",
                        help="random seed of the inputs (default: 0)")


def _execute(args: argparse.Namespace) -> Outcome:
    import mlc

    _check_inputs(args.inputs)
    if args.output:
        options.check_folder(args.output)
    exe = mlc.load(args.model)
    files = _parse_inputs(args.inputs, [spec.name for spec in exe.inputs])
    arrays = {name: _load_array(name, path) for name, path in files.items()}
    inputs = _complete(exe, arrays, args.seed, options.sizes(args, exe.inputs))
    outputs = exe(*inputs)
    names = [spec.name for spec in exe.outputs]
    if args.output:
        _save(args.output, dict(zip(names, outputs, strict=True)))
    drawn = f"random, seed {args.seed}"
    document: dict[str, Any] = {
        "model": args.model,
        "inputs": [
            {**s, "shape": list(array.shape), "source": str(files.get(s["name"], drawn))}
            for s, array in zip(options.specs(exe.inputs), inputs, strict=True)
        ],
        "outputs": [_summary(name, array) for name, array in zip(names, outputs, strict=True)],
    }
    if args.output:
        document["output"] = str(args.output)
    if args.repeat:
        document["latency"] = _latency(exe, inputs, args.repeat)
    return Outcome(document, lambda console: _render(document, console))


def _check_inputs(words: list[str]) -> None:
    """Report what is wrong with the options, whatever the model's inputs are."""
    certain = set()
    for word in words:
        name, equals, path = word.partition("=")
        if not (name and equals and path):
            raise UsageError(f"--input must look like NAME=FILE.npy, got {word!r}")
        if "=" in path:  # the name may go on
            continue
        if name in certain:
            raise _twice(name)
        certain.add(name)


def _twice(name: str) -> UsageError:
    return UsageError(f"each input must be given once, but --input {name}=... came twice")


def _parse_inputs(words: list[str], known: Sequence[str]) -> dict[str, Path]:
    """Each input's file. A name may have ``=`` in it: the longest one that a word begins with is meant."""
    files: dict[str, Path] = {}
    for word in words:
        name = max((each for each in known if word.startswith(f"{each}=")), key=len, default=word.partition("=")[0])
        if name in files:
            raise _twice(name)
        files[name] = Path(word[len(name) + 1:])
    return files


def _load_array(name: str, path: Path) -> np.ndarray:
    import numpy as np

    try:
        array = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise InputError(f"input {name} must come from a file, but {path} does not exist; write it first") from None
    except (ValueError, OSError, EOFError) as error:
        why = str(error).splitlines()[0]
        raise InputError(f"input {name} needs what numpy.save writes, but {path} is not ({why})") from error
    if not isinstance(array, np.ndarray):  # an .npz archive
        raise InputError(f"input {name} must come from a .npy file, but {path} is an archive; save the array alone")
    return array


def _complete(
    exe: Executable, arrays: dict[str, np.ndarray], seed: int, sizes: dict[str, int]
) -> list[np.ndarray]:
    """The given inputs, and seeded random values for the others, in the model's order. Free sizes are those of the
    given inputs, then ``sizes``, then the usual ones."""
    from mlc.networks.inputs import random_inputs

    known = [spec.name for spec in exe.inputs]
    unknown = sorted(arrays.keys() - set(known))
    if unknown:
        raise InputError(f"an input's name must be one of {', '.join(known)}, got {', '.join(unknown)}")
    given = {spec.name: _of_type(arrays[spec.name], spec.dtype) for spec in exe.inputs if spec.name in arrays}
    for spec in exe.inputs:
        if spec.name in given and given[spec.name].ndim == len(spec.shape):
            known_sizes = zip(spec.shape, given[spec.name].shape, strict=True)
            sizes = {**sizes, **{size.name: n for size, n in known_sizes if isinstance(size, Free)}}
    return list({**random_inputs(exe.inputs, seed, sizes), **given}.values())


def _of_type(array: np.ndarray, dtype: str) -> np.ndarray:
    """``array``; the bytes that :func:`numpy.save` writes of a bfloat16 array, whose type it has no name for, as such.
    """
    from mlc.frontend.model import array_type

    return array.view(array_type(dtype)) if dtype == "bfloat16" and array.dtype.str == "|V2" else array


def _save(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """An archive as ``numpy.savez`` writes it, to exactly this path and whatever the arrays' names are.

    An array of bfloat16 comes back from :func:`numpy.load` as two bytes an element; ``.view(ml_dtypes.bfloat16)`` of it
    has the numbers.
    """
    import zipfile

    import numpy as np

    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)


def _latency(exe: Executable, inputs: list[np.ndarray], repeat: int) -> dict[str, Any]:
    """Milliseconds a call over ``repeat`` calls, after the one that made the outputs."""
    import numpy as np

    times = []
    for _ in range(repeat):
        started = time.perf_counter()
        exe(*inputs)
        times.append(time.perf_counter() - started)
    low, middle, high = (float(q) for q in np.percentile(np.array(times) * 1e3, (10, 50, 90)))
    return {"runs": repeat, "median_ms": middle, "p10_ms": low, "p90_ms": high, "min_ms": min(times) * 1e3}


def _summary(name: str, array: np.ndarray) -> dict[str, Any]:
    numeric = array.size > 0 and (array.dtype.kind in "fiu" or array.dtype.name == "bfloat16")
    values = {"min": float(array.min()), "max": float(array.max()), "mean": float(array.mean())} if numeric else {}
    return {"name": name, "shape": list(array.shape), "dtype": str(array.dtype), **values}


def _render(document: dict[str, Any], console: Console) -> None:
    from mlc.report import format as fmt
    from mlc.report.tables import table

    console.print(table(("input", "shape", "type", "from"),
                        [(i["name"], _shape(i["shape"]), i["dtype"], i["source"]) for i in document["inputs"]]))
    values = ("min", "mean", "max")
    rows = [(o["name"], _shape(o["shape"]), o["dtype"], *(f"{o[k]:.5g}" if k in o else "-" for k in values))
            for o in document["outputs"]]
    console.print(table(("output", "shape", "type", *values), rows, right=values))
    if "latency" in document:
        t = document["latency"]
        middle, low, high = (fmt.seconds(t[k] / 1e3) for k in ("median_ms", "p10_ms", "p90_ms"))
        console.print(f"latency over {t['runs']} runs: median {middle}, p10 {low}, p90 {high}")
    if "output" in document:
        console.print(f"written: {document['output']}", soft_wrap=True)


def _shape(shape: list[int]) -> str:
    return "×".join(map(str, shape)) or "scalar"


COMMAND = Command("run", "run a compiled model", _add_arguments, _execute)
