"""Records for the tests of the log: every field filled, each one different."""

from __future__ import annotations

import json
import random

from mlc.log import Record

VERSIONS = "tvm0.27.0.post1-llvm22"


def key(task: int, versions: str = VERSIONS) -> str:
    return f"{task:016x}-llvm/znver5/2-{versions}"


def record(trial: int, task: int = 0, *, ok: bool = True, versions: str = VERSIONS, session: str = "s") -> Record:
    """A record whose time and trace depend on all arguments."""
    rng = random.Random(f"{trial}/{task}/{ok}/{versions}/{session}")
    trace = json.dumps([["SampleCategorical", [], [rng.randrange(99) for _ in range(40)], f"überwacht\n{trial}"]])
    return Record(
        task_key=key(task, versions), task_name=f"fused_conv2d_{task}", space="cpu.conv2d_nchwc",
        decisions={"tile": rng.randrange(1, 9), "unroll": rng.randrange(0, 4)}, trace=trace,
        times=tuple(rng.uniform(1e-5, 1e-2) for _ in range(3)) if ok else (),
        failure="" if ok else "crash", detail="" if ok else "SIGSEGV", machine="Test CPU, 2 cores", versions=versions,
        seed=trial * 7, session=session, trial=trial, build_seconds=rng.random(), when=1.7e9 + trial / 3,
        flops=rng.random() * 1e9, extra={"predicted": "1.5e-3"},
    )
