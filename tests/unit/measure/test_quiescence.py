"""Waiting for another process's threads."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from mlc.measure.quiescence import wait_until_quiescent

pytestmark = pytest.mark.alone

_SPINS = """
import time
end = time.monotonic() + 0.4
print(flush=True)
while time.monotonic() < end: pass
time.sleep(9)
"""


def test_it_waits_for_a_process_that_spins_and_no_longer() -> None:
    with subprocess.Popen([sys.executable, "-c", _SPINS], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        started = time.monotonic()
        wait_until_quiescent(process.pid, timeout=5.0)
        assert 0.3 < time.monotonic() - started < 2.0
        started = time.monotonic()
        wait_until_quiescent(process.pid)
        assert time.monotonic() - started < 0.3
        process.kill()


def test_patience_ends_and_a_process_that_is_gone_is_at_rest() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        time.sleep(0.1)
        started = time.monotonic()
        wait_until_quiescent(process.pid, timeout=0.2)
        assert 0.15 < time.monotonic() - started < 1.0
        process.kill()
    started = time.monotonic()
    wait_until_quiescent(process.pid)
    assert time.monotonic() - started < 0.3
