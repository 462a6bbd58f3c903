"""Trackers, workers and sessions killed at random moments: no acknowledged record is lost, no run hangs, the next one
goes on where the last was killed."""

from __future__ import annotations

import contextlib
import queue
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from killed_run import BEGINNING

from mlc.log import TuningLog, check
from mlc.testing.rack import Rack

pytest.importorskip("tornado", reason="the extra `rpc` is not installed")

TOKEN = "a secret that the tests share"
#: trials that the last run, which nobody kills, is given beyond what was spent by then
MORE = 8
#: seconds without a word of a run after which it hangs: workers may have to start, and so may the tracker
PATIENCE = 60.0
RUN = BEGINNING + """
from mlc.measure.executors import fleet, parse, remote_measurer
from mlc.tuning.events import BatchMeasured

path, trials, executor = sys.argv[1:]
with TuningLog(path) as log, remote_measurer(fleet(parse(executor)), 1) as measurer:
    def acknowledge(event):
        if isinstance(event, BatchMeasured):
            print(log.count(), flush=True)  # the event speaks of what is in the log already
    options = TuneOptions(trials=int(trials), seed=1, batch=4, resume=True, confirm_rounds=2)
    report = tune_tasks(tasks, target, log, options, measurer, acknowledge)
    print(report.reason, report.trials, flush=True)
"""


class _Run:
    """A session, and what it has said."""

    def __init__(self, path: Path, trials: int, executor: str) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", RUN, str(path), str(trials), executor],
                                        stdout=subprocess.PIPE, text=True)
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.words: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def hear(self) -> str:
        """The next line; empty at the end."""
        try:
            word = self._lines.get(timeout=PATIENCE).strip()
        except queue.Empty:
            raise AssertionError(f"the run hangs: nothing was said for {PATIENCE:.0f} s") from None
        self.words.append(word)
        assert not word or word.isdigit() or word.split()[0] in ("trials", "finished"), f"not a run's word: {word}"
        return word

    def drain(self) -> None:
        """Take what has been said by now."""
        with contextlib.suppress(queue.Empty):
            while True:
                self.words.append(self._lines.get_nowait().strip())

    def kill(self) -> None:
        processes = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        self.process.wait()
        while self.hear():
            pass
        assert not psutil.wait_procs(processes, timeout=15)[1], "what a session started ends when it is gone"

    @property
    def acknowledged(self) -> int:
        return max((int(word) for word in self.words if word.isdigit()), default=0)


@pytest.fixture
def rack(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rack]:
    monkeypatch.setenv("MLC_TOKEN", TOKEN)
    made = Rack(2, TOKEN)
    yield made
    made.close()


class _Nodes:
    """Two nodes of a Ray cluster beside its head, of which any may be killed; as :class:`mlc.testing.rack.Rack`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from mlc.measure.ray_devices import PREFIX, authentication, loopback

        for name, value in (authentication() | loopback("")).items():
            monkeypatch.setenv(name, value)
        from ray.cluster_utils import Cluster

        size = {"num_cpus": 1, "object_store_memory": 80_000_000}
        self._node = {**size, "resources": {PREFIX + "rack": 1}}
        self._cluster = Cluster(initialize_head=True, head_node_args=size)
        self._nodes: list[Any] = []
        self.executor = f"ray://{self._cluster.address}/rack"

    def start(self) -> None:
        while len(self._nodes) < 2:
            self._nodes.append(self._cluster.add_node(**self._node))

    def kill_something(self, rng: random.Random) -> str:
        self._cluster.remove_node(self._nodes.pop(rng.randrange(len(self._nodes))), allow_graceful=False)
        return "node"

    def close(self) -> None:
        self._cluster.shutdown()


def _is_whole(path: Path, acknowledged: int) -> int:
    """The records of a log that has all that was acknowledged, each candidate once."""
    report = check(path)
    assert report.ok and report.records >= acknowledged
    with TuningLog(path) as log:
        measured = [record for record in log.records() if record.verdict is None]
        spent = max((session.trials for session in log.sessions()), default=0)
    assert sorted(r.trial for r in measured) == list(range(1, len(measured) + 1))
    assert spent == len(measured), "records and the budget that they used up go together"
    assert len({(r.task_key, tuple(sorted(r.decisions.items()))) for r in measured}) == len(measured)
    return len(measured)


def _survive(rack: Rack | _Nodes, path: Path, kills: int, seed: int) -> dict[str, int]:
    """Kill so many times, the session every third; how often what was killed."""
    rng, killed = random.Random(seed), dict[str, int]()
    run, known, spent = None, 0, 0
    for number in range(kills):
        rack.start()
        if run is None:
            run = _Run(path, 10**6, rack.executor)
            assert run.hear().isdigit(), "a run begins, or goes on"
        time.sleep(rng.uniform(0.05, 1.0))
        if number % 3 == 1:
            run.kill()
            known, victim, spent = max(known, run.acknowledged), "session", _is_whole(path, run.acknowledged)
            run = None
        else:
            victim = rack.kill_something(rng)
            time.sleep(rng.uniform(0.0, 1.0))
            rack.start()
            run.drain()
            assert run.hear().isdigit() and run.process.poll() is None, f"a run goes on without its {victim}"
        killed[victim] = killed.get(victim, 0) + 1
    if run is not None:
        run.kill()
        spent = _is_whole(path, max(known, run.acknowledged))
    rack.start()
    last = _Run(path, spent + MORE, rack.executor)
    while last.hear():
        pass
    assert last.words[-2] == f"trials {MORE}" and last.process.wait() == 0
    _is_whole(path, last.acknowledged)
    return killed


@pytest.mark.alone
def test_a_run_outlives_its_fleet_and_goes_on_after_its_own_end(rack: Rack, tmp_path: Path) -> None:
    killed = _survive(rack, tmp_path / "log.db", 2, seed=1)
    assert killed.pop("session") == 1 and sum(killed.values()) == 1


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(1800)
def test_fifty_kills_lose_no_acknowledged_record(rack: Rack, tmp_path: Path) -> None:
    killed = _survive(rack, tmp_path / "log.db", 50, seed=7)
    assert sum(killed.values()) == 50 and set(killed) == {"session", "tracker", "worker", "inside"}, killed


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.skipif(find_spec("ray") is None, reason="the extra `ray` is not installed")
def test_a_run_outlives_the_nodes_of_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLC_TOKEN", TOKEN)
    nodes = _Nodes(monkeypatch)
    try:
        killed = _survive(nodes, tmp_path / "log.db", 6, seed=3)
    finally:
        nodes.close()
    assert killed == {"node": 4, "session": 2}
