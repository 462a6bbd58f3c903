"""How many threads compiled code runs on: the environment is set once, the pool is only touched when it must be."""

from __future__ import annotations

import os
import subprocess
import sys

from mlc.threads import environment

_SCRIPT = """
import os
import sys
import threading
sys.modules["torch"] = None  # tvm_ffi would spend a second on it
from mlc import threads
from mlc.build import runtime
count = runtime.function("runtime.NumThreads")  # the library comes before the settings
threads.configure(1)
seen = [count()]
for n in (4, 2, 4):
    threads.configure(n)
    seen.append(count())
other = threading.Thread(target=lambda: (threads.configure(3), seen.append(count())))
other.start(); other.join()
seen.append(count())
print(*seen, os.environ["TVM_NUM_THREADS"], os.environ["TVM_BIND_THREADS"])
"""


def _run(**variables: str) -> list[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TVM_NUM", "TVM_BIND", "OMP_"))}
    done = subprocess.run([sys.executable, "-c", _SCRIPT], env={**clean, **variables}, check=True,
                          capture_output=True, text=True)
    return done.stdout.split()


def test_a_small_first_number_does_not_limit_later_ones() -> None:
    assert _run(MLC_THREADS="4") == ["1", "4", "2", "4", "3", "4", "4", "0"]


def test_the_environment_goes_before() -> None:
    assert _run(MLC_THREADS="4", TVM_NUM_THREADS="2") == ["1", "2", "2", "2", "2", "2", "2", "0"]


def test_environment_of_a_worker() -> None:
    assert environment(3) == {"TVM_NUM_THREADS": "3", "TVM_BIND_THREADS": "0"}
