"""Devices without a compiler: what is built here is checked and timed by a worker that has TVM's runtime and numpy."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import measure_tasks as tasks
import numpy as np
import pytest
import tvm_ffi

from mlc import runtime
from mlc.errors import MeasureError
from mlc.measure import wire
from mlc.measure.board import Board
from mlc.measure.executor import Job
from mlc.measure.export import Exporter
from mlc.measure.measurer import MeasureOptions, MeasureRequest, MeasureResult
from mlc.measure.rpc_devices import native_target, run_on
from mlc.target import Target, resolve
from schedules.machine import cpu_machine

ROOT = Path(__file__).resolve().parents[3]
OPTIONS = MeasureOptions(threads=1, min_repeat_seconds=0.002, timeout=5.0)


@pytest.fixture(scope="module")
def exporter() -> Iterator[Exporter]:
    made = Exporter(2)
    yield made
    made.close()


class _Session:
    """Calls a board's functions by their names, as an RPC session does."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self.put: list[str] = []

    def get_function(self, name: str):  # type: ignore[no-untyped-def]
        function = getattr(self._board, name.removeprefix("mlc.board."))
        if name != "mlc.board.put":
            return function
        return lambda file, data: (self.put.append(file), function(file, bytes(data)))


@pytest.fixture
def session() -> Iterator[_Session]:
    board = Board()
    yield _Session(board)
    board.close()


def _run(
    session: _Session, exporter: Exporter, requests: Sequence[MeasureRequest], rounds: int = 0
) -> tuple[MeasureResult, ...]:
    exporter.expect(requests, OPTIONS)
    return run_on(session, exporter, Job("job", tuple(requests), OPTIONS, rounds))


def test_good_candidates_are_timed_and_others_fail_as_they_do_here(session: _Session, exporter: Exporter) -> None:
    func = tasks.gemm()
    good = [replace(tasks.request(func, trace), constants=(1,), constant_bytes=1 << 20)
            for trace in tasks.traces(func, 3)]
    task = tasks.doubled()
    evil = [tasks.request(task, scheduled=each) for each in (tasks.tripled, tasks.half_written, tasks.segfault)]
    evil.append(replace(good[0], trace="no trace"))
    results = _run(session, exporter, [*good, *evil])
    assert [r.failure for r in results] == ["", "", "", "wrong", "wrong", "crash", "build"]
    assert all(len(r.times) >= 1 and r.code_hash and r.build_seconds > 0 for r in results[:3])
    assert "elements differ from the reference" in results[3].detail
    sent = len(session.put)
    again = _run(session, exporter, good[:2], rounds=4)
    assert [len(r.times) for r in again] == [4, 4]
    assert len(session.put) == sent, "what a device has is not sent again"
    assert [r.code_hash for r in again] == [r.code_hash for r in results[:2]]


def test_a_reference_that_cannot_be_computed_is_told(session: _Session, exporter: Exporter) -> None:
    from tvm import tirx

    nowhere = tasks.elementwise(lambda x: tirx.log(-tirx.abs(x) - tirx.const(1.0, "float32")))
    (result,) = _run(session, exporter, [tasks.request(nowhere, scheduled=nowhere)])
    assert result.failure == "run" and "NaN" in result.detail


def test_files_that_are_no_digests_and_jobs_before_their_files_are_refused(session: _Session) -> None:
    board = session._board
    for name in ("../x.so", "abc.so", "0" * 32 + ".py", "0" * 32 + "/x.so"):
        with pytest.raises(MeasureError, match="must be a digest"):
            board.put(name, b"")
    absent = "0" * 32
    interface = {"params": [], "reference": f"{absent}.npz", "gauge": f"{absent}.so"}
    request = MeasureRequest("key", json.dumps(interface), "", "", f"{absent}.so")
    with pytest.raises(MeasureError, match="after its files"):
        board.run(wire.job_text(Job("job", (request,), OPTIONS)))


def test_room_is_made_for_files_that_a_job_needs(session: _Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlc.measure.board._ROOM", 25)
    names = [f"{i:032x}.so" for i in range(4)]
    for name in names:
        session._board.put(name, bytes(10))
    assert json.loads(session._board.missing(json.dumps(names[:1]))) == []
    assert json.loads(session._board.missing(json.dumps(names))) == names[1:3], "those that were used last stay"


@pytest.mark.parametrize("text", [
    "{}", "[]", "no JSON", json.dumps({"protocol": 0}), json.dumps({"protocol": wire.BOARD_PROTOCOL, "machine": 3}),
    wire.Board("older", "0.27", "aarch64", "", (), "", 4, 0, 1).text(),  # it knows nothing of a request's baseline
])
def test_what_no_board_says(text: str) -> None:
    with pytest.raises(MeasureError, match="install the same version on both sides") as caught:
        wire.board_of(text)
    assert "\n" not in str(caught.value)


_PI5 = wire.Board("cortex-a76, 4 cores", "0.27", "aarch64", "cortex-a76", ("asimd", "asimddp", "fp"), "l1=64K", 4, 0)


@pytest.mark.parametrize(("board", "mcpu", "dots", "cores"), [
    (_PI5, "cortex-a76", True, 4),
    (replace(_PI5, flags=("asimd", "fp")), "cortex-a76", False, 4),  # hidden by a hypervisor
    (replace(_PI5, cpu="", flags=("asimd", "asimddp", "fp"), cores=2), "generic", True, 2),
    (replace(_PI5, cpu="", flags=()), "generic", False, 4),
])
def test_the_target_of_a_board_is_what_its_cpu_shows(board: wire.Board, mcpu: str, dots: bool, cores: int) -> None:
    assert wire.board_of(board.text()) == board
    target = Target("native", native_target(board))
    machine = cpu_machine(target.tvm)
    assert (target.architecture, target.threads) == ("aarch64", cores)
    assert json.loads(target.attrs)["mcpu"] == mcpu and (machine.dot_per_cycle > 0) == dots
    assert (machine.vector_bytes, machine.vector_registers, machine.l1_bytes) == (16, 32, 64 << 10)


def test_a_board_like_this_machine_has_its_target() -> None:
    board = Board()
    said = wire.board_of(board.describe())
    board.close()
    here, there = json.loads(resolve("native").attrs), json.loads(native_target(said))
    assert {k: v for k, v in here.items() if k != "model"} == {k: v for k, v in there.items() if k != "model"}


_SCRIPT = """
import sys
from pathlib import Path
sys.modules["torch"] = None
from mlc.measure.board import Board
board = Board()
print(board.describe())
for path in Path(sys.argv[1]).iterdir():
    if path.suffix in (".so", ".npz"):
        board.put(path.name, path.read_bytes())
print(board.run((Path(sys.argv[1]) / "job").read_text()))
(worker,) = board._measurer._pool._slots
print("maps", [Path(f"/proc/{pid}/maps").read_text().count("libtvm_compiler") for pid in ("self", worker.pid)])
board.close()
loaded = {name.partition(".")[0] for name in sys.modules} & {"tvm", "scipy", "onnx", "xgboost", "cost_model", "rich"}
print("loaded", sorted(loaded), sorted(n for n in sys.modules if n.startswith("schedules.")))
"""


def _board_folder(folder: Path) -> dict[str, str]:
    """What a board has: parts of mlc, numpy, tvm_ffi and the runtime library; the environment of Python there."""
    packages = folder / "packages"
    packages.mkdir(parents=True)
    (packages / "mlc").mkdir()
    for module in (ROOT / "mlc").glob("*.py"):
        shutil.copy(module, packages / "mlc")
    shutil.copytree(ROOT / "mlc" / "measure", packages / "mlc" / "measure")
    (packages / "schedules").mkdir()
    for name in ("__init__", "caches"):
        shutil.copy(ROOT / "schedules" / f"{name}.py", packages / "schedules")
    for distribution in ("numpy", "apache-tvm-ffi", "typing_extensions"):
        for path in {Path(file).parts[0] for file in metadata.files(distribution) or ()} - {"..", "__pycache__"}:
            found = Path(str(metadata.distribution(distribution).locate_file(path)))
            (packages / path).symlink_to(found)
    described = next(f for f in metadata.files("apache-tvm") or () if f.name == "METADATA")
    (packages / Path(described).parent).symlink_to(Path(str(described.locate())).parent)
    library = folder / "lib"
    library.mkdir()
    files = [Path(str(f.locate())) for f in metadata.files("apache-tvm") or () if f.name == "libtvm_runtime.so"]
    (library / "libtvm_runtime.so").symlink_to(files[0])
    return {"PYTHONPATH": str(packages), "TVM_LIBRARY_PATH": str(library), "PYTHONNOUSERSITE": "1",
            "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(folder), "PATH": os.environ["PATH"]}


def _without_packages() -> str:
    """A Python without this environment's packages, or a skip."""
    python = str(getattr(sys, "_base_executable", sys.executable))
    found = subprocess.run([python, "-c", "import tvm"], capture_output=True, check=False,
                           env={"PATH": os.environ["PATH"], "PYTHONNOUSERSITE": "1"})
    if found.returncode == 0:
        pytest.skip("TVM is installed for the base Python too, so nothing shows that it is not needed")
    return python


def test_a_worker_needs_numpy_and_the_runtime_alone(tmp_path: Path, exporter: Exporter) -> None:
    python, env = _without_packages(), _board_folder(tmp_path / "board")
    func = tasks.gemm()
    requests = [tasks.request(func, trace) for trace in tasks.traces(func, 2)]
    jobs: list[str] = []

    class Recorded:
        def get_function(self, name: str):  # type: ignore[no-untyped-def]
            return {
                "mlc.board.missing": lambda names: names,
                "mlc.board.put": lambda name, data: (tmp_path / name).write_bytes(data),
                "mlc.board.run": lambda text: jobs.append(text) or "[]",
            }[name]

    with pytest.raises(ValueError, match="zip"):  # nothing answers
        run_on(Recorded(), exporter, Job("job", tuple(requests), OPTIONS))
    (tmp_path / "job").write_text(jobs[0])
    done = subprocess.run([python, "-c", _SCRIPT, str(tmp_path)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    described, results, maps, loaded = done.stdout.splitlines()
    assert wire.board_of(described).tvm == runtime.version() == metadata.version("apache-tvm")
    assert [(r.failure, len(r.times) > 0) for r in wire.results_of(results)] == [("", True)] * 2, results
    assert maps == "maps [0, 0]", "a compiler was loaded"
    assert loaded == "loaded [] ['schedules.caches']"


def test_every_type_of_tensor_comes_and_goes_unchanged() -> None:
    from mlc.measure.prebuilt_runner import PrebuiltRunner

    bench = PrebuiltRunner(1)
    rng = np.random.default_rng(0)
    for dtype in ("float32", "float64", "int8", "uint8", "int32", "int64", "float16", "bool"):
        array = (rng.standard_normal((3, 5)) * 3).astype(dtype)
        tensor = bench._tensor(array, {})
        assert isinstance(tensor, tvm_ffi.Tensor) and tuple(tensor.shape) == (3, 5)
        np.testing.assert_array_equal(bench._read(tensor, dtype), array)
