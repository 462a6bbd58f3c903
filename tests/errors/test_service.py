"""Many threads, forked processes and a full disk: what a service does to a library, none of it is fatal or wrong."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import mlc
from mlc.artifact import emit
from mlc.errors import BuildError, MlcError

HANG = 120.0  # seconds that nothing here comes near


def two_layers(seed: int) -> tuple[onnx.ModelProto, np.ndarray, np.ndarray]:
    """A model, its input and its output, computed by numpy."""
    rng = np.random.default_rng(seed)
    x, w, v = (rng.standard_normal(shape).astype("float32") for shape in ((64, 24), (24, 48), (48, 24)))
    nodes = [helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("Relu", ["a"], ["b"]),
             helper.make_node("MatMul", ["b", "v"], ["y"])]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [64, 24]) for name in "xy"]
    weights = [numpy_helper.from_array(w, "w"), numpy_helper.from_array(v, "v")]
    graph = helper.make_graph(nodes, "two_layers", ends[:1], ends[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return model, x, np.maximum(x @ w, 0) @ v


def test_eight_threads_compile_and_leave_the_process_as_it_was() -> None:
    cases = [two_layers(seed) for seed in range(8)]
    mlc.compile(cases[0][0], log=False, threads=2)  # imports add filters for warnings once
    before = sys.stdout, sys.stderr, warnings.showwarning, warnings.filters, list(warnings.filters)
    start, outputs = threading.Barrier(8), dict[int, np.ndarray]()

    def compile_one(index: int) -> None:
        model, x, _ = cases[index]
        start.wait()
        outputs[index] = mlc.compile(model, log=False, threads=2)(x)[0]

    group = [threading.Thread(target=compile_one, args=(index,)) for index in range(8)]
    for thread in group:
        thread.start()
    for thread in group:
        thread.join(HANG)
    assert sorted(outputs) == list(range(8)), "the others failed"
    for index, (_, _, expected) in enumerate(cases):
        np.testing.assert_allclose(outputs[index], expected, rtol=1e-4, atol=1e-4)
    after = sys.stdout, sys.stderr, warnings.showwarning, warnings.filters, list(warnings.filters)
    assert all(a is b for a, b in zip(before[:4], after[:4], strict=True)) and before[4] == after[4]


def test_the_importers_prints_are_kept_back_and_nobody_elses(capsys: pytest.CaptureFixture[str]) -> None:
    from tvm.relax.frontend.onnx import onnx_frontend

    from mlc.frontend.onnx_relax import _quiet

    with _quiet():
        onnx_frontend.print("the importer's")
        other = threading.Thread(target=lambda: onnx_frontend.print("another thread's"))
        other.start()
        other.join()
        print("mine")
    onnx_frontend.print("a user's of TVM")
    assert capsys.readouterr().out.splitlines() == ["another thread's", "mine", "a user's of TVM"]


_SCRIPT = """
import os, sys, threading
import numpy as np
sys.modules["torch"] = None  # tvm_ffi would spend a second on it
import mlc
exe, x, expected = mlc.load("model.so"), np.load("x.npy"), np.load("y.npy")
def right():
    return np.allclose(exe(x)[0], expected, rtol=1e-4, atol=1e-4)
def in_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()
assert right()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a compiled model, an input and what comes out."""
    place = tmp_path_factory.mktemp("service")
    model, x, expected = two_layers(7)
    mlc.compile(model, log=False, threads=3).save(place / "model.so")
    onnx.save(model, place / "model.onnx")
    np.save(place / "x.npy", x)
    np.save(place / "y.npy", expected)
    return place


def run(folder: Path, script: str, before: Sequence[str] = (), **variables: str) -> list[str]:
    """What the script prints, which must end well, and soon; compiled code has three threads on any machine."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TVM_", "OMP_"))}
    root = str(Path(mlc.__file__).parents[1])
    env = {**clean, "MLC_THREADS": "3", "PYTHONPATH": root, **variables}
    done = subprocess.run([*before, sys.executable, "-c", script], cwd=folder, env=env, capture_output=True, text=True,
                          timeout=HANG)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


def test_short_lived_threads_leave_no_threads(folder: Path) -> None:
    lines = run(folder, _SCRIPT + """
for _ in range(500):
    in_thread(right)
group = [threading.Thread(target=lambda: [right() for _ in range(50)]) for _ in range(40)]
for thread in group: thread.start()
for thread in group: thread.join()
print(len(os.listdir("/proc/self/task")))
""")
    assert int(lines[0]) < 24


@pytest.mark.parametrize("parent", ["right()", "in_thread(right)", "[in_thread(right) for _ in range(9)]"])
def test_a_forked_process_computes_and_ends(folder: Path, parent: str) -> None:
    """It ends by the ordinary way out too, where a pool of dead threads would be waited for."""
    lines = run(folder, _SCRIPT + f"""
import time
{parent}
time.sleep(0.5)  # the pool's threads sleep now
child = os.fork()
if child == 0:
    works = right()
    in_thread(right)
    sys.exit(5 if works else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), right())
""")
    assert lines == ["5 True"]


def test_a_fork_amid_a_call_of_another_thread_leaves_no_lock_behind(folder: Path) -> None:
    lines = run(folder, _SCRIPT + """
stop = []
def busy():
    while not stop: right()
other = threading.Thread(target=busy)
other.start()
codes = []
for _ in range(10):
    child = os.fork()
    if child == 0:
        os._exit(5 if right() else 1)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
stop.append(1)
other.join()
print(codes == [5] * 10)
""")
    assert lines == ["True"]


def test_multiprocessing_by_fork(folder: Path) -> None:
    lines = run(folder, _SCRIPT + """
import multiprocessing
with multiprocessing.get_context("fork").Pool(2) as pool:
    print(pool.starmap(right, [()] * 8) == [True] * 8)
""")
    assert lines == ["True"]


def test_what_a_call_raises_and_ctrl_c_reach_the_caller() -> None:
    from mlc import threads

    with pytest.raises(ZeroDivisionError):
        threads.call(1, lambda: 1 // 0)
    assert threads.call(1, divmod, 7, 2) == (3, 1)
    caller, ended = threads._Caller(), []

    def interrupts_its_caller() -> None:
        import signal
        import time

        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.2)
        ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        caller.run(interrupts_its_caller)
    assert ended, "its arrays were in use"
    assert caller.run(lambda: 3) == 3


def test_objects_lie_in_memory_and_a_full_folder_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def full(_output: str, objects: Sequence[str], **_: object) -> None:
        seen.extend(os.path.realpath(path) for path in objects)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(emit, "link_shared", full)
    with pytest.raises(BuildError, match=r"No space left on device; make room, or name another folder in TMPDIR") as e:
        mlc.compile(two_layers(0)[0], log=False, threads=2)
    assert "\n" not in str(e.value) and len(seen) == 2
    assert all("/memfd:" in path for path in seen) == hasattr(os, "memfd_create")


def test_a_folder_that_is_gone_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    with pytest.raises(BuildError, match="name another folder in TMPDIR"):
        mlc.compile(two_layers(0)[0], log=False, threads=2)


def test_a_really_full_folder_ends_no_process(folder: Path, tmp_path: Path) -> None:
    own = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=8k none "$0" && exec "$@"', str(tmp_path)]
    if shutil.which("unshare") is None or subprocess.run([*own, "true"], capture_output=True).returncode:
        pytest.skip("needs user namespaces, to mount a folder of a few kilobytes")
    lines = run(folder, """
import mlc
try:
    mlc.compile("model.onnx", log=False, substitutions=False)
except mlc.errors.BuildError as error:
    print(error)
""", own, TMPDIR=str(tmp_path))
    assert len(lines) == 1 and "No space left on device" in lines[0], lines
    assert issubclass(BuildError, MlcError)
