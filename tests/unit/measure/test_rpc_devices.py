"""TVM's own tracker with two workers of ours: they measure, one is killed, so is the tracker, strangers stay out."""

from __future__ import annotations

import contextlib
import platform
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from measure_tasks import doubled, gemm, request, traces, tripled
from tvm import te, tirx

import mlc
from mlc.cli import probes
from mlc.errors import BuildError, MeasureError, MlcError, UsageError
from mlc.graph.kernels.integer import dense_integer, pack_dense
from mlc.graph.task import normalise, task_key, to_json
from mlc.measure.executors import fleet, parse, remote_measurer
from mlc.measure.measurer import MeasureRequest, MeasureResult
from mlc.measure.rpc_protocol import RPC_MAGIC, RPC_MISMATCH, RPC_SUCCESS, Tracker, endpoint, proof
from mlc.target import Target
from mlc.testing.aarch64 import Emulated, missing_python
from mlc.testing.programs import dense
from mlc.testing.rack import Rack, end, free_port, until
from mlc.tuning.devices import devices
from schedules import registry
from schedules.intrin.dot import QUADS
from schedules.machine import cpu_machine
from schedules.space import first_seed
from schedules.trace import trace_json

pytest.importorskip("tornado", reason="the extra `rpc` is not installed")

TOKEN = "a secret that the tests share"
SERVER = "mlc.measure.rpc_server"


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLC_TOKEN", TOKEN)


@pytest.fixture(scope="module")
def rack() -> Iterator[Rack]:
    """A tracker and two workers, for tests that leave them alive."""
    made = Rack(2, TOKEN)
    yield made
    made.close()


@pytest.fixture
def own_rack() -> Iterator[Rack]:
    """The same for one that does not."""
    made = Rack(2, TOKEN)
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.alone
def test_two_workers_one_of_which_is_killed_and_then_the_tracker(
    own_rack: Rack, monkeypatch: pytest.MonkeyPatch
) -> None:
    rack = own_rack
    with pytest.raises(MeasureError, match=r"registered under 'other', but the tracker .* has board"):
        _fleet(rack.port, "other")
    with monkeypatch.context() as changed:
        changed.setattr("mlc.runtime.version", lambda: "0.1")
        with pytest.raises(MeasureError, match=r"must have TVM 0\.1 as .*, but has .* there") as said:
            _fleet(rack.port)
    assert "\n" not in str(said.value)
    with monkeypatch.context() as changed:
        changed.setattr("mlc.measure.rpc_devices.draws", lambda: 0)
        with pytest.raises(MeasureError, match=r"same random numbers .*; install numpy=="):
            _fleet(rack.port)
    first, second = rack.workers
    assert first is not None and second is not None and rack.tracker is not None
    func = gemm()
    requests = [request(func, trace) for trace in traces(func, 32)]
    with remote_measurer(_fleet(rack.port), threads=2) as measurer:
        status = measurer.executor.status  # type: ignore[attr-defined]
        until(lambda: measurer.executor.poll(1.0) == [] and sum(s.state == "idle" for s in status()) == 2)
        told: list[int] = []

        def on_result(index: int, _result: MeasureResult) -> None:
            told.append(index)
            if len(told) == 4:
                end(first)
            elif len(told) == 16:
                end(rack.tracker)

        results = measurer.measure(requests, on_result)
        states = [s.state for s in status()]
    assert sorted(told) == list(range(32)) and all(r.times and not r.failure for r in results)
    assert {r.machine.partition(":")[0] for r in results} == {"board"}
    assert any("gone" in state for state in states), states
    rack.workers = [second]
    rack.start()  # the worker that is left comes back by itself


def test_who_does_not_know_the_token_is_turned_away(rack: Rack, monkeypatch: pytest.MonkeyPatch) -> None:
    def knock(key: Callable[[str], str]) -> int:
        tracker = Tracker("127.0.0.1", rack.port)
        tracker.request("board")
        host, at, nonce = tracker.granted()
        with socket.create_connection((host, at), 20) as peer:
            said = f"client:{key(nonce)}".encode()
            peer.sendall(struct.pack("<ii", RPC_MAGIC, len(said)) + said)
            (code,) = struct.unpack("<i", peer.recv(4))
        tracker.close()
        return int(code)

    assert knock(lambda nonce: nonce) == RPC_MISMATCH  # as TVM's own clients do
    monkeypatch.setenv("MLC_TOKEN", "another")
    assert knock(proof) == RPC_MISMATCH
    monkeypatch.setenv("MLC_TOKEN", TOKEN)
    assert knock(proof) == RPC_SUCCESS


def test_without_a_linker_for_the_devices_a_run_ends_before_it_begins(
    rack: Rack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(architecture: str) -> list[str]:
        raise BuildError(f"no linker for {architecture}")

    monkeypatch.setattr("mlc.tuning.devices.find_linker", missing)
    with pytest.raises(BuildError, match=f"no linker for {platform.machine()}"), devices(rack.executor, "native"):
        pass


def test_this_machine_measures_for_its_own_architecture_alone() -> None:
    other = "x86-64-v3" if platform.machine() == "aarch64" else "aarch64:cortex-a72"
    with pytest.raises(UsageError, match=f"measuring for {other} needs a device of .*mlc worker --rpc") as caught:
        mlc.tune(dense().mod, target=other, trials=1)
    assert "\n" not in str(caught.value)


def test_workers_listen_on_the_loopback_address_alone(rack: Rack) -> None:
    for process in (rack.tracker, *rack.workers):
        assert process is not None
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        listening = []
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):  # one that measured and ended meanwhile
                listening += [c.laddr.ip for c in member.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert listening and set(listening) <= {"127.0.0.1"}, listening


def test_targets_that_the_devices_cannot_run_are_refused(rack: Rack) -> None:
    with pytest.raises(UsageError, match="measure CPUs alone, but the target is cuda"), \
            devices(rack.executor, "cuda:sm_90"):
        pass
    other = "x86-64-v3" if platform.machine() == "aarch64" else "aarch64:cortex-a76"
    with pytest.raises(UsageError, match=f"devices' architecture, {platform.machine()}, but {other} is of") as caught, \
            devices(rack.executor, other):
        pass
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.skipif(bool(missing_python()), reason=missing_python())
def test_a_device_of_another_architecture_measures_what_is_built_for_it_here(tmp_path: Path) -> None:
    """Emulated, so its times say nothing: candidates for NEON and its dot products compute what this machine does."""
    emulated = Emulated()
    rack = Rack(1, TOKEN, environment=emulated.environment, command=[*emulated.python, "-P", "-m", SERVER])
    try:
        with devices(rack.executor, "native") as reached:
            assert isinstance(reached.target, Target) and reached.fleet is not None
            assert reached.target.architecture == "aarch64" and "cortex-a76" in reached.machine
            target = reached.target
            assert cpu_machine(target.tvm).dot_per_cycle > 0
            requests = [
                MeasureRequest(task_key(func, target), to_json(func), target.attrs, trace_json(schedule))
                for func in (gemm(), _integer_product())
                for schedule, _ in [first_seed(registry.find(func, target.tvm), func, target.tvm)]
            ]
            assert ".sdot" in requests[1].trace
            evil = to_json(normalise(tripled))
            requests.append(MeasureRequest("doubled", to_json(doubled()), target.attrs, "", evil))
            measurer = reached.measurer(target.threads)
            assert measurer is not None
            results = measurer.measure(requests)
            assert [r.failure for r in results] == ["", "", "wrong"], [r.detail for r in results]
            rounds = measurer.compare(requests[:2], 3)
            assert [len(r.times) for r in rounds] == [3, 3]
        report = mlc.tune(dense().mod, executor=rack.executor, trials=6, log=tmp_path / "log.db")
        assert report.trials == 6 and not report.failures
    finally:
        rack.close()


@pytest.mark.parametrize(("text", "message"), [
    ("cloud", "one of local, ray"), ("ray:/x", "one of local"), ("rpc://127.0.0.1:9190", "one of local"),
    ("rpc://127.0.0.1:99999/key", "one of local"), ("", "one of local"),
])
def test_what_is_no_executor(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse(text)
    assert "\n" not in str(caught.value) and repr(text) in str(caught.value)


@pytest.mark.parametrize(("executor", "problem", "remedy"), [
    ("rpc://127.0.0.1:9/board", "a tracker must answer", "tvm.exec.rpc_tracker"),
    ("rpc://192.0.2.7:9190/board", "the tracker must be at 127.0.0.1", "ssh -L"),
    ("ray://127.0.0.1:9/rack", "Ray must be installed", "pip install 'mlc[ray]'"),
])
def test_doctor_says_what_is_wrong_with_an_executor(
    monkeypatch: pytest.MonkeyPatch, executor: str, problem: str, remedy: str
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    (finding,) = probes._executor(executor)
    assert finding.state == "wrong" and finding.remedy and problem in finding.value.replace("an RPC", "a")
    assert remedy in finding.remedy and "\n" not in finding.value + finding.remedy


def test_doctor_lists_the_devices(rack: Rack) -> None:
    findings = probes._executor(rack.executor)
    assert findings and all(f.state == "ok" and f.name == "device" and "board" in f.value for f in findings)


def test_a_tracker_elsewhere_needs_a_tunnel() -> None:
    with pytest.raises(UsageError, match=r"ssh -L 9190:127\.0\.0\.1:9190 192\.0\.2\.7"):
        endpoint("192.0.2.7:9190")


def test_no_tracker_and_something_else_at_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MeasureError, match=r"tvm\.exec\.rpc_tracker") as caught:
        _fleet(free_port())
    assert "\n" not in str(caught.value)
    monkeypatch.delenv("MLC_TOKEN")
    with pytest.raises(MlcError, match="MLC_TOKEN"):
        _fleet(free_port())


def _integer_product() -> tirx.PrimFunc:
    """Bytes of either sign, of which four make a dot product."""
    packed = pack_dense(np.zeros((64, 32), "int8"), QUADS)
    x, w = te.placeholder((12, 64), "uint8", name="x"), te.placeholder(packed.shape, "int8", name="w")
    return normalise(te.create_prim_func([x, w, dense_integer(x, w)]))


def _fleet(port: int, key: str = "board"):  # type: ignore[no-untyped-def]
    address = parse(f"rpc://127.0.0.1:{port}/{key}")
    assert address is not None
    return fleet(address)

