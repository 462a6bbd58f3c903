"""The demo, ``mlc doctor`` and the tests on CPUs that this one can play, each without a part of its features.

    python -m tests.machines [--only "AVX2 hidden"] [--demo-seconds 20] [-- -m "not slow" tests/unit]

What follows ``--`` goes to pytest (left out: what ``make test`` runs, without tests of what is the same on every CPU).
Where mlc reads the CPU's flags a file stands with fewer (``MLC_CPUINFO``); where LLVM asks the CPU for its name, it is
answered by ``tests.performance.hidden_cpu``. A machine is not run again while its file in ``build/machines/`` is there.
Takes half the time of a ``make test`` for each of eleven machines; any failure is exit code 1. The demo's
peers see the CPU as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from rich.table import Table

from mlc.report.console import stdout_console
from mlc.report.tables import table
from tests.performance import hidden_cpu

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "build" / "machines"
#: tests of what is the same on every CPU: rules and their proofs, kernels for GPUs
_SAME = ["--ignore=tests/unit/substitution", "--ignore=tests/gpu", "--ignore-glob=*/test_cuda_*",
         "--ignore=tests/fuzz/test_certificates.py", "--ignore=tests/fuzz/test_rules.py"]
#: what else `make test` runs: beside each other, then alone
SELECTIONS = (["-n", "auto", "--maxprocesses", "8", "--dist", "worksteal", "-m", "not slow and not alone", *_SAME],
              ["-m", "not slow and alone", *_SAME])
_AVX512 = ["avx512"]
_AVX2 = [*_AVX512, "avx2", "fma", "vaes", "vpclmulqdq"]
_AVX = [*_AVX2, "avx", "f16c"]


@dataclass(frozen=True)
class Machine:
    """A CPU to play: the flags that are taken from /proc/cpuinfo, whether that file can be read, and whether LLVM is
    told the CPU's family."""

    hidden: Sequence[str] = ()
    listed: bool = True
    named: bool = True

    def environment(self, name: str) -> dict[str, str]:
        """Variables for processes on it."""
        folder = FOLDER / "cpu"
        if not self.named:
            hidden_cpu.copy_package("tvm", folder / "site")
            asked = [*hidden_cpu.expand(self.hidden), *hidden_cpu.GROUPS["name"]]
            return hidden_cpu.environment(asked, folder)
        described = folder / f"cpuinfo {name}"
        if self.listed:
            folder.mkdir(parents=True, exist_ok=True)
            flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
            described.write_text(hidden_cpu.without(hidden_cpu.expand(self.hidden), flags), encoding="utf-8")
        return {"MLC_CPUINFO": str(described)}


MACHINES = {
    "AVX-512 hidden": Machine(_AVX512),
    "VNNI hidden": Machine(["vnni"]),
    "bf16 hidden": Machine(["avx512_bf16", "amx_bf16"]),
    "AVX2 hidden": Machine(_AVX2),
    "FMA hidden": Machine(["fma"]),
    "F16C hidden": Machine(["f16c"]),
    "AVX hidden": Machine(_AVX),
    "BMI hidden": Machine(["bmi1", "bmi2", "abm"]),
    "no /proc/cpuinfo": Machine(listed=False),
    "unknown name": Machine(named=False),
    "unknown name, AVX-512 hidden": Machine(_AVX512, named=False),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run what was not run yet, and print what came of all; 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=MACHINES, metavar="MACHINE",
                        help=f"one of {'; '.join(MACHINES)}; may be repeated (default: all)")
    parser.add_argument("--demo-seconds", type=float, default=20.0, help="how long each demo tunes (default: 20)")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, after -- (default: of make test's tests those "
                                                  "that a CPU may change)")
    args = parser.parse_args(argv)
    results = []
    for name in args.only or MACHINES:
        results.append(result_of(name, args.pytest, args.demo_seconds))
        stdout_console().print(summary(results))
    for result in results:
        for failure in result["failures"]:
            stdout_console().print(f"{result['machine']}: {failure}")
    return int(any(result["failures"] for result in results))


def result_of(name: str, pytest: Sequence[str], demo_seconds: float) -> dict[str, Any]:
    """What came of a machine, from its file if it was run before."""
    stem = name.replace("/", " ")
    file = FOLDER / f"{stem}.json"
    if not file.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        result = {"machine": name, **run(stem, MACHINES[name].environment(stem), pytest, demo_seconds)}
        file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return dict(json.loads(file.read_text(encoding="utf-8")))


def run(stem: str, variables: dict[str, str], pytest: Sequence[str], demo_seconds: float) -> dict[str, Any]:
    """Doctor, demo and tests in processes of their own with these variables."""
    started = time.monotonic()
    environment = {**os.environ, **variables}

    def command(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", module, "--json", *arguments], env=environment, cwd=ROOT,
                              check=False, capture_output=True, text=True)

    doctor = command("mlc.cli.main", "doctor")
    demo = command("mlc.cli.demo", "--seconds", str(demo_seconds), "--directory", str(FOLDER / f"demo {stem}"))
    failures = [f"{what}: {done.stderr.strip()[-500:]}" for what, done in (("mlc doctor", doctor), ("demo", demo))
                if done.returncode]
    counts = Counter[str]()
    for number, selection in enumerate([list(pytest)] if pytest else SELECTIONS):
        report = FOLDER / f"{stem} {number}.xml"
        report.unlink(missing_ok=True)
        # CPUID is answered through SIGILL, which pytest's faulthandler would take for a crash
        subprocess.run([sys.executable, "-m", "pytest", "-p", "no:faulthandler", f"--junitxml={report}", *selection],
                       env=environment, cwd=ROOT, check=False)
        if not report.exists():
            failures.append(f"pytest {shlex.join(selection)}: no report")
            continue
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
            counts[min(kinds, default="passed")] += 1  # errors before failures before what was skipped
            if kinds & {"failure", "error"}:
                failures.append(f"{case.get('classname')}::{case.get('name')}")
    findings = {row["name"]: row["value"] for row in json.loads(doctor.stdout)["findings"]} if doctor.stdout else {}
    return {
        "target": findings.get("target native", "-"), "features": findings.get("cpu features", "-"),
        "speedup_over_best_peer": json.loads(demo.stdout)["speedup_over_best_peer"] if not demo.returncode else None,
        "passed": counts["passed"], "skipped": counts["skipped"], "failures": failures,
        "minutes": (time.monotonic() - started) / 60,
    }


def summary(results: Sequence[dict[str, Any]]) -> Table:
    """A row for each machine; its target and what failed by name are in its file."""
    return table(
        ["machine", "vectors", "demo / best peer", "passed", "skipped", "failed", "minutes"],
        [[row["machine"], row["features"].split("up to ")[-1].split(";")[0],
          f"{row['speedup_over_best_peer']:.2f}" if row["speedup_over_best_peer"] else "-",
          row["passed"], row["skipped"], len(row["failures"]), f"{row['minutes']:.1f}"] for row in results],
        right=["demo / best peer", "passed", "skipped", "failed", "minutes"],
    )


if __name__ == "__main__":
    sys.exit(main())
