"""Two real Ray nodes on this machine: they measure, one is killed, what it had goes to the other."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from typing import Any

import pytest
from measure_tasks import gemm, request, traces

from mlc.errors import MeasureError
from mlc.measure.executors import fleet, parse, remote_measurer

if importlib.util.find_spec("ray") is None:  # importing it would make it read its settings
    pytest.skip("the extra `ray` is not installed", allow_module_level=True)
pytestmark = [pytest.mark.slow, pytest.mark.alone]

CLASS = "rack"
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


def _at(cluster: Any, rest: str) -> Any:
    return _at_text(f"ray://{cluster.address}{rest}")


def _at_text(text: str) -> Any:
    address = parse(text)
    assert address is not None
    return address
