"""Two real Ray nodes on this machine: they measure, one is killed, what it had goes to the other."""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from measure_tasks import gemm, request, traces

from mlc import subprocesses
from mlc.errors import MeasureError
from mlc.measure.executors import fleet, parse, remote_measurer
from mlc.testing.rack import end, until

if importlib.util.find_spec("ray") is None:  # importing it would make it read its settings
    pytest.skip("the extra `ray` is not installed", allow_module_level=True)
pytestmark = [pytest.mark.slow, pytest.mark.alone]

CLASS = "rack"
HEAD = 6379  # the port that Ray's own command takes
NODE = {"num_cpus": 1, "object_store_memory": 80_000_000}
TOKEN = "a secret of forty characters, for a test"


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two nodes of a class, behind a token; the first is the head."""
    from mlc.measure.ray_devices import PREFIX, authentication

    monkeypatch.setenv("MLC_TOKEN", TOKEN)
    for name, value in authentication().items():
        monkeypatch.setenv(name, value)
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"resources": {PREFIX + CLASS: 1}, **NODE})
    made.second = made.add_node(resources={PREFIX + CLASS: 1}, **NODE)  # type: ignore[attr-defined]
    yield made
    made.shutdown()


def test_a_run_on_two_nodes_one_of_which_is_killed(cluster: Any) -> None:
    func = gemm()
    requests = [request(func, trace) for trace in traces(func, 24)]
    with remote_measurer(fleet(_at(cluster, f"/{CLASS}")), threads=2) as measurer:
        devices = measurer.executor
        deadline = time.monotonic() + 120
        while sum(status.state == "idle" for status in devices.status()) < 2 and time.monotonic() < deadline:
            devices.poll(1.0)
        told: list[int] = []

        def on_result(index: int, _result: object) -> None:
            if not told:
                cluster.remove_node(cluster.second, allow_graceful=False)
            told.append(index)

        results = measurer.measure(requests, on_result)
        states = [status.state for status in devices.status()]
    assert sorted(told) == list(range(24)) and all(r.times and not r.failure for r in results)
    assert {r.machine.partition(":")[0] for r in results} == {CLASS}
    assert any("left the cluster" in state or "died" in state for state in states), states


def test_a_node_of_another_version_and_a_class_that_is_not_there(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MeasureError, match="none has come") as caught:
        fleet(_at(cluster, "/other"), patience=3.0)
    assert "\n" not in str(caught.value)
    monkeypatch.setattr("mlc.graph.task.versions", lambda: "tvm0.1-llvm1")
    with pytest.raises(MeasureError, match=r"must have the versions of the session, tvm0.1") as caught:
        fleet(_at(cluster, ""), patience=100.0)
    assert "\n" not in str(caught.value)


def test_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLC_TOKEN", TOKEN)
    with pytest.raises(MeasureError, match=r"must answer at 127\.0\.0\.1:9") as caught:
        fleet(_at_text("ray://127.0.0.1:9/rack"))
    assert "\n" not in str(caught.value)


def _listening(processes: list[psutil.Process]) -> set[str]:
    """The addresses that they listen on, and their children."""
    found = set()
    for process in {child for p in processes for child in [p, *p.children(recursive=True)]}:
        with contextlib.suppress(psutil.Error):
            found |= {c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    return found


SESSION = """
import psutil, sys
from mlc.measure.executors import fleet, parse
with open(sys.argv[1], "w") as told:
    devices = fleet(parse(sys.argv[2]))
    told.write(devices.machine)
sys.stdin.read()
devices.close()
"""


@pytest.mark.parametrize("executor", ["ray", f"ray://127.0.0.1:{HEAD}/{CLASS}"])
def test_clusters_of_this_machine_listen_on_the_loopback_address_alone(tmp_path: Path, executor: str) -> None:
    """Ray's processes are looked at while they measure; a worker starts the head of the second cluster."""
    env = subprocesses.environment(MLC_TOKEN=TOKEN)
    head = None
    if executor != "ray":
        try:
            socket.create_connection(("127.0.0.1", HEAD), 1).close()
            pytest.skip(f"something listens at {HEAD} already")
        except OSError:
            pass
        head = subprocess.Popen(subprocesses.command("mlc.cli.main", "worker", "--class", CLASS), env=env,
                                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until(lambda: _open(HEAD), 120)
    told = tmp_path / "told"
    session = subprocess.Popen([sys.executable, "-c", SESSION, str(told), executor], env=env, stdin=subprocess.PIPE)
    try:
        until(lambda: session.poll() is not None or (told.exists() and told.read_text() != ""), 120)
        processes = [psutil.Process(p.pid) for p in (session, head) if p is not None]
        addresses = _listening(processes)
        assert addresses and addresses <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}, addresses
        session.communicate(b"", timeout=60)
    finally:
        for process in (session, head):
            if process is not None:
                end(process)


def _open(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), 1).close()
        return True
    return False


def _at(cluster: Any, rest: str) -> Any:
    return _at_text(f"ray://{cluster.address}{rest}")


def _at_text(text: str) -> Any:
    address = parse(text)
    assert address is not None
    return address
