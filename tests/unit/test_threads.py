"""How many threads compiled code runs on: the environment is set once, the pool is only touched when it must be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from mlc import config
from mlc.threads import environment

_SCRIPT = """
import os
import sys
import threading
sys.modules["torch"] = None  # tvm_ffi would spend a second on it
from mlc import threads
from mlc.artifact import runtime
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


def test_hyper_threads_of_one_core_count_once(tmp_path: Path) -> None:
    """Eight CPUs, of which 0 and 4, 1 and 5, ... share a core; two dies number their cores from 0 each."""
    for cpu in range(8):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "core_id").write_text(str(cpu % 2))
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    assert config._separate(range(8), tmp_path) == 4
    assert config._separate({0, 4}, tmp_path) == 1
    assert config._separate({2, 5, 6}, tmp_path) == 2
    assert config._separate({0, 9}, tmp_path) == 2, "where the system does not say, every CPU is a core"


def test_a_containers_limit_counts_in_both_forms(tmp_path: Path) -> None:
    assert config._quota(range(8), tmp_path) == 8
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    for text, cores in (("-1", 8), ("300000", 3), ("250000", 3), ("1000", 1)):
        (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(f"{text}\n")
        assert config._quota(range(8), tmp_path) == cores
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    assert config._quota(range(8), tmp_path) == 8
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert config._quota(range(8), tmp_path) == 2
