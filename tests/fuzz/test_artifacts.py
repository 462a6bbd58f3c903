"""A sample of what ``python -m tests.fuzz.artifacts`` tries, in a process that has run no compiled code yet."""

from __future__ import annotations

import subprocess
import sys

from tests.fuzz.artifacts import STRATEGIES


def test_damaged_and_crafted_artifacts_are_refused_or_right() -> None:
    command = [sys.executable, "-m", "tests.fuzz.artifacts", "--count", str(2 * len(STRATEGIES)), "--seed", "11"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    cases, refused, right, *bad = map(int, done.stdout.splitlines()[-1].split()[1:])
    assert cases == 2 * len(STRATEGIES) and refused > cases // 2 and right > 0 and bad == [0, 0, 0, 0]
