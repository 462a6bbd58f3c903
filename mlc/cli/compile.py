"""``mlc compile``: a model and what the log knows of it become one file that runs on TVM's small runtime."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlc.cli import options
from mlc.cli.outcome import Command, Outcome

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["COMMAND"]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    options.add_target(parser)
    options.add_log(parser)
    parser.add_argument("-o", "--output", type=Path, metavar="MODEL.so",
                        help="the artifact (default: the model's name, in this folder)")
    parser.add_argument("--report", type=Path, metavar="DIR",
                        help="write an HTML report of every function into this folder")


def _execute(args: argparse.Namespace) -> Outcome:
    import time

    import mlc
    from mlc.cli.models import find_model

    model = find_model(args.model)
    output = args.output or Path(f"{model.stem}.so")
    options.check_folder(output)
    if args.report:
        from mlc.report.html import check_report_folder

        check_report_folder(args.report)
    started = time.perf_counter()
    exe = mlc.compile(model.source(), target=args.target, log=args.log)
    exe.save(output)
    took = time.perf_counter() - started
    document: dict[str, Any] = {
        "model": args.model, "output": str(output), "bytes": output.stat().st_size, "seconds": round(took, 3),
        "target": exe.metadata.get("target"), "functions": exe.metadata.get("functions", []),
        "inputs": options.specs(exe.inputs), "outputs": options.specs(exe.outputs),
    }
    if args.report:
        from mlc.report.html import write_report

        document["report"] = str(write_report(args.report, model.stem, exe))
    return Outcome(document, lambda console: _render(document, console))


def _render(document: dict[str, Any], console: Console) -> None:
    from mlc.report import format as fmt

    functions = document["functions"]
    tuned = sum(bool(f.get("tuned")) for f in functions)
    console.print(
        f"{document['output']}: {fmt.bytes_(document['bytes'])} for {document['target']}, {len(functions)} functions "
        f"({tuned} from the log), in {document['seconds']:.1f} s", soft_wrap=True,
    )
    if "report" in document:
        console.print(f"report: {document['report']}", soft_wrap=True)
    if tuned < len(functions):
        console.print(f"to make it faster: mlc tune {document['model']}", soft_wrap=True)


COMMAND = Command("compile", "build a model into one file", _add_arguments, _execute, epilog=options.MODELS_EPILOG)
