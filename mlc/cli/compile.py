"""``mlc compile``: builds a model, with the log's best schedules, into one file that runs on TVM's runtime."""

from __future__ import annotations

import argparse
import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlc.cli import options, precision
from mlc.cli.outcome import Command, Outcome
from mlc.config import get
from mlc.errors import UsageError
from mlc.report import format as fmt

if TYPE_CHECKING:
    from rich.console import Console

    from mlc.artifact import Executable
    from mlc.graph.substitute.choose import Decision

__all__ = ["COMMAND"]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument("--target", default="native", metavar="T[,T...]",
                        help="what to build for; `mlc targets` lists the names. For several, as "
                             "cuda:sm_80,cuda:sm_90a, one file is written, and the best is picked when it is loaded "
                             "(default: native, this CPU)")
    options.add_threads(parser)
    options.add_log(parser)
    options.add_shape(parser)
    options.add_value(parser)
    options.add_winograd(parser)
    options.add_substitutions(parser)
    options.add_integers(parser)
    precision.add_precision(parser)
    parser.add_argument("-o", "--output", type=Path, metavar="MODEL.so",
                        help="the artifact (default: the model's name, in this folder)")
    parser.add_argument("--report", type=Path, metavar="DIR",
                        help="write an HTML report on every function to this folder")
    parser.add_argument("--explain", type=Path, metavar="DIR",
                        help="write to this folder which substitutions were made and why, with drawings of the graph "
                             "before and after")


def _execute(args: argparse.Namespace) -> Outcome:
    from mlc import api
    from mlc.artifact import Bundle
    from mlc.artifact.smoke_test import save_tested
    from mlc.cli.models import find_model
    from mlc.report.building import building
    from mlc.report.console import stderr_console
    from mlc.target import several

    if len(several(args.target)) > 1 and (args.report or args.explain):
        raise UsageError(f"--report and --explain show one target, but --target names several, {args.target}; give one")
    model = find_model(args.model)
    if model.is_artifact:
        raise UsageError(f"{args.model} is compiled already; give the model that it was built from")
    output = args.output or Path(f"{model.stem}.so")
    options.check_folder(output)
    if args.report:
        from mlc.report.html import check_folder

        check_folder(args.report)
    if args.explain:
        from mlc.report.html import check_folder

        check_folder(args.explain)
    decisions: list[Decision] = []
    started = time.perf_counter()
    with _dumping(args.report), building(stderr_console(), f"compiling {model.stem}"):
        exe = api.compile(model.source(), target=args.target, log=args.log, shapes=options.shapes(args),
                          values=options.values(args), threads=args.threads, winograd=args.winograd,
                          substitutions=args.substitutions, precision=args.precision, integers=args.integers,
                          on_decision=decisions.append if args.explain else None)  # a decision holds the weights
    tried = save_tested(exe, output, native=args.target == "native")
    took = time.perf_counter() - started
    document: dict[str, Any] = {
        "model": args.model, "output": str(output), "bytes": output.stat().st_size, "ran": tried,
        "seconds": round(took, 3), "inputs": options.specs(exe.inputs), "outputs": options.specs(exe.outputs),
        **precision.facts(args, model, args.target, exe if tried else None),
    }
    if isinstance(exe, Bundle):
        document.update(shared_bytes=exe.shared_bytes, targets=[_built_for(each) for each in exe.variants])
        return Outcome(document, lambda console: _render_bundle(document, console))
    document.update(_built_for(exe))
    if args.explain:
        document.update(_explanation(args.explain, exe.metadata["name"], decisions))
    if args.report:
        document.update(_kernels(args.report, exe))
        document["report"] = str(_report(args, document, exe))
    return Outcome(document, lambda console: _render(args, document, console))


def _built_for(exe: Executable) -> dict[str, Any]:
    return {name: exe.metadata[name] for name in ("target", "threads", "functions")}


def _explanation(folder: Path, name: str, decisions: list[Decision]) -> dict[str, Any]:
    """The decision about substitutions, and where it is drawn; None if they are disabled or failed."""
    from mlc.report.substitutions import facts, write

    if not decisions:
        return {"substitutions": None}
    return {"substitutions": {**facts(decisions[0]), "report": str(write(folder, name, decisions[0]))}}


@contextmanager
def _dumping(report: Path | None) -> Iterator[None]:
    """The report shows code, so have the compiler write it down, unless ``MLC_DUMP_DIR`` asks for that already."""
    if report is None or get("MLC_DUMP_DIR"):
        yield
        return
    os.environ["MLC_DUMP_DIR"] = str(report / "ir")
    try:
        yield
    finally:
        del os.environ["MLC_DUMP_DIR"]


def _kernels(report: Path, exe: Executable) -> dict[str, Any]:
    """The compiler's report on a GPU's kernels, for the first architecture, with the function that each belongs to."""
    if exe.metadata["kind"] != "cuda":
        return {}
    from mlc.codegen.inspection import dumped

    arch = exe.metadata["target"].partition("/")[2].partition(",")[0]
    found = dumped(Path(get("MLC_DUMP_DIR") or report / "ir"), arch)
    symbols = sorted((f["symbol"] for f in exe.metadata["functions"]), key=len, reverse=True)
    of = {kernel.name: next((s for s in symbols if kernel.name.startswith(f"{s}_kernel")), "") for kernel in found}
    return {"kernels": [{**kernel.to_json(), "function": of[kernel.name]} for kernel in found]}


def _report(args: argparse.Namespace, document: dict[str, Any], exe: Executable) -> Path:
    from mlc.log import layered
    from mlc.log.shipped import is_shipped
    from mlc.report.html import CompileReport, FunctionRow, scripts, write
    from mlc.target import resolve

    functions = document["functions"]
    with layered(args.log, resolve(args.target)) as log:
        records = {
            f["key"]: [r for r in log.records(f["key"]) if r.verdict is None and not is_shipped(r)]
            for f in functions
        }
    code = scripts(Path(get("MLC_DUMP_DIR") or args.report / "ir") / "build_scheduled.py")
    rows = [
        FunctionRow(f["name"], f["calls"], f["space"], _source(f), f["seconds"], f["flops"], len(records[f["key"]]),
                    f["decisions"], code.get(f["symbol"], ""), f["origins"], f["bytes"], f["roofline_seconds"])
        for f in functions
    ]
    rounded = [precision.line(document)] if "max_rel_err" in document else []
    versions = ", ".join(f"{name} {version}" for name, version in exe.metadata["versions"].items())
    facts = [document["target"], f"{document['threads']} threads", fmt.bytes_(document["bytes"]),
             f"built in {document['seconds']:.1f} s", *rounded, versions]
    every = [record for found in records.values() for record in found]
    return write(args.report, CompileReport(exe.metadata["name"], facts, rows, every, document.get("kernels", ())))


def _source(function: dict[str, Any]) -> str:
    """The origin of a function's schedule, and what failed before it was used."""
    replaced = function["replaced"]
    return f"{function['source']} ({replaced})" if replaced else str(function["source"])


def _render_bundle(document: dict[str, Any], console: Console) -> None:
    targets = ", ".join(each["target"] for each in document["targets"])
    console.print(
        f"{document['output']}: {fmt.bytes_(document['bytes'])} for {targets}, {fmt.bytes_(document['shared_bytes'])} "
        f"saved by weights that they share, in {document['seconds']:.1f} s; "
        f"{'what can run here ran once' if document['ran'] else 'not run here'}", soft_wrap=True,
    )


def _render(args: argparse.Namespace, document: dict[str, Any], console: Console) -> None:
    functions = document["functions"]
    tuned, shipped, untimed = (sum(f["source"] == source for f in functions)
                               for source in ("log", "shipped", "untimed"))
    replaced = sum(bool(f["replaced"]) for f in functions)
    sources = f"{tuned} from the log" + (f", {shipped} as shipped" if shipped else "")
    sources += f", {untimed} untimed" if untimed else ""
    sources += f", {replaced} replaced since code generation failed" if replaced else ""
    console.print(
        f"{document['output']}: {fmt.bytes_(document['bytes'])} for {document['target']}, {len(functions)} functions "
        f"({sources}), in {document['seconds']:.1f} s; {'it ran once' if document['ran'] else 'not run here'}",
        soft_wrap=True,
    )
    free = {size["name"]: size for spec in document["inputs"] for size in spec["shape"] if isinstance(size, dict)}
    if free:
        listed = ", ".join(f"{s['name']}={s['low']}..{s['high']} (usual: {s['usual']})" for s in free.values())
        console.print(f"free sizes: {listed}", soft_wrap=True)
    if "max_rel_err" in document:
        console.print(precision.line(document), soft_wrap=True)
    if "substitutions" in document:
        _render_substitutions(document["substitutions"], console)
    if "report" in document:
        console.print(f"report: {document['report']}", soft_wrap=True)
    if tuned < len(functions) and not free:
        words = ["mlc", "tune", args.model, *(["--target", args.target] if args.target != "native" else []),
                 *(["--log", args.log] if args.log else []), *options.shape_words(args),
                 *(["--no-winograd"] if args.winograd is False else []),
                 *(["--no-substitutions"] if args.substitutions is False else []),
                 *(["--no-integers"] if args.integers is False else []), *precision.words(args)]
        console.print(f"to make it faster: {shlex.join(words)}", soft_wrap=True)


def _render_substitutions(found: dict[str, Any] | None, console: Console) -> None:
    from mlc.report.substitutions import lines

    if found is None:
        console.print("substitutions: none; they are switched off, or a warning says what went wrong")
        return
    for line in [*lines(found), f"graphs: {found['report']}"]:
        console.print(line, soft_wrap=True)


COMMAND = Command("compile", "build a model into one file", _add_arguments, _execute, epilog=options.MODELS_EPILOG)
