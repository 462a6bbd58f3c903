"""TVM's own tracker with two workers of ours: they measure, one is killed, so is the tracker, strangers stay out."""

from __future__ import annotations

import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
from measure_tasks import gemm, request, traces

from mlc import children
from mlc.errors import MeasureError, MlcError, UsageError
from mlc.measure.executors import fleet, parse, remote_measurer
from mlc.measure.measurer import MeasureResult
from mlc.measure.rpc_protocol import Tracker, endpoint, proof

pytest.importorskip("tornado", reason="the extra `rpc` is not installed")

TOKEN = "a secret that the tests share"


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLC_TOKEN", TOKEN)


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that are ended with the test, and theirs."""
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        for child in [*psutil.Process(process.pid).children(recursive=True), process]:
            child.kill()
    process.wait()


def _until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing came"
        time.sleep(0.1)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _tracker(port: int) -> subprocess.Popen[bytes]:
    where = ["--host", "127.0.0.1", f"--port={port}", f"--port-end={port + 1}"]
    command = children.command("tvm.exec.rpc_tracker", *where)
    process = subprocess.Popen(command, env=children.environment(), stderr=subprocess.DEVNULL)
    _until(lambda: _answers(port))
    return process


def _answers(port: int) -> bool:
    try:
        Tracker("127.0.0.1", port).close()
    except MeasureError:
        return False
    return True


def _worker(port: int, key: str = "board") -> subprocess.Popen[bytes]:
    command = children.command("mlc.cli.main", "worker", "--rpc", f"127.0.0.1:{port}/{key}")
    return subprocess.Popen(command, env=children.environment(MLC_TOKEN=TOKEN))


def _devices(port: int, key: str = "board") -> int:
    tracker = Tracker("127.0.0.1", port)
    try:
        return tracker.count(key)
    finally:
        tracker.close()


@pytest.mark.slow
@pytest.mark.alone
def test_two_workers_one_of_which_is_killed_and_then_the_tracker(started: list[subprocess.Popen[bytes]]) -> None:
    port = _free_port()
    started.append(_tracker(port))
    with pytest.raises(MeasureError, match=r"registered under 'board', but the tracker .* has none at all"):
        _fleet(port)
    started += [_worker(port), _worker(port)]
    _until(lambda: _devices(port) == 2)
    with pytest.raises(MeasureError, match="has board"):
        _fleet(port, "other")
    func = gemm()
    requests = [request(func, trace) for trace in traces(func, 32)]
    with remote_measurer(_fleet(port), threads=2) as measurer:
        status = measurer.executor.status  # type: ignore[attr-defined]
        _until(lambda: measurer.executor.poll(1.0) == [] and sum(s.state == "idle" for s in status()) == 2)
        told: list[int] = []

        def on_result(index: int, _result: MeasureResult) -> None:
            told.append(index)
            if len(told) == 4:
                _end(started[1])
            elif len(told) == 16:
                _end(started[0])

        results = measurer.measure(requests, on_result)
        states = [s.state for s in status()]
    assert sorted(told) == list(range(32)) and all(r.times and not r.failure for r in results)
    assert {r.machine.partition(":")[0] for r in results} == {"board"}
    assert any("gone" in state for state in states), states
    started.append(_tracker(port))  # the worker that is left comes back by itself
    _until(lambda: _devices(port) == 1)


@pytest.mark.slow
@pytest.mark.alone
def test_who_does_not_know_the_token_is_turned_away(
    started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tvm.rpc import base

    port = _free_port()
    started += [_tracker(port), _worker(port)]
    _until(lambda: _devices(port) == 1)

    def knock(key: Callable[[str], str]) -> int:
        tracker = Tracker("127.0.0.1", port)
        tracker.request("board")
        host, at, nonce = tracker.granted()
        with socket.create_connection((host, at), 20) as peer:
            said = f"client:{key(nonce)}".encode()
            peer.sendall(struct.pack("<ii", base.RPC_MAGIC, len(said)) + said)
            (code,) = struct.unpack("<i", peer.recv(4))
        tracker.close()
        return int(code)

    assert knock(lambda nonce: nonce) == base.RPC_CODE_MISMATCH  # as TVM's own clients do
    monkeypatch.setenv("MLC_TOKEN", "another")
    assert knock(proof) == base.RPC_CODE_MISMATCH
    monkeypatch.setenv("MLC_TOKEN", TOKEN)
    assert knock(proof) == base.RPC_CODE_SUCCESS


@pytest.mark.parametrize(("text", "message"), [
    ("cloud", "one of local, ray"), ("ray:/x", "one of local"), ("rpc://127.0.0.1:9190", "one of local"),
    ("rpc://127.0.0.1:99999/key", "one of local"), ("", "one of local"),
])
def test_what_is_no_executor(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse(text)
    assert "\n" not in str(caught.value) and repr(text) in str(caught.value)


def test_a_tracker_elsewhere_needs_a_tunnel() -> None:
    with pytest.raises(UsageError, match=r"ssh -L 9190:127\.0\.0\.1:9190 192\.0\.2\.7"):
        endpoint("192.0.2.7:9190")


def test_no_tracker_and_something_else_at_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MeasureError, match=r"tvm\.exec\.rpc_tracker") as caught:
        _fleet(_free_port())
    assert "\n" not in str(caught.value)
    monkeypatch.delenv("MLC_TOKEN")
    with pytest.raises(MlcError, match="MLC_TOKEN"):
        _fleet(_free_port())


def _fleet(port: int, key: str = "board"):  # type: ignore[no-untyped-def]
    address = parse(f"rpc://127.0.0.1:{port}/{key}")
    assert address is not None
    return fleet(address)

