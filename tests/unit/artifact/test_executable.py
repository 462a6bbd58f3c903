"""Compiled models compute what they should, whatever the shapes, types and memory of their arrays."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import tvm_ffi
from tvm import relax, topi

from mlc.artifact import Executable, ModelMeta, compile_module, load
from mlc.errors import InputError
from mlc.frontend.model import TensorSpec, array_type
from mlc.target import resolve
from mlc.testing import programs
from mlc.testing.programs import Program

TARGET = resolve("native", threads=2)


def _inputs(specs: Sequence[TensorSpec], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)

    def one(spec: TensorSpec) -> np.ndarray:
        values = rng.standard_normal(spec.shape) * 5
        return np.asarray(values > 0 if spec.dtype == "bool" else values).astype(spec.dtype)

    return [one(spec) for spec in specs]


def _check(outputs: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    assert len(outputs) == len(expected)
    for got, want in zip(outputs, expected, strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * max(1.0, float(np.abs(want).max())))


@pytest.fixture(scope="module")
def dense() -> tuple[Executable, Program]:
    case = programs.dense()
    return compile_module(case.mod, TARGET), case


CASES = (programs.dense, programs.many_results, programs.scalars, programs.constant_result, programs.twins)


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_results_before_and_after_saving(make: Callable[[], Program], tmp_path: Path) -> None:
    case = make()
    exe = compile_module(case.mod, TARGET)
    exe.save(tmp_path / "model.so")
    loaded = load(tmp_path / "model.so")
    assert (loaded.inputs, loaded.outputs) == (exe.inputs, exe.outputs)
    for seed in range(2):
        arrays = _inputs(exe.inputs, seed)
        _check(exe(*arrays), case.reference(*arrays))
        _check(loaded(*arrays), case.reference(*arrays))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_numbers_of_16_bits(dtype: str, tmp_path: Path) -> None:
    """Shared where they lie well, copied where they do not; DLPack of numpy knows no bfloat16."""
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType((4, 32), dtype))
    with builder.function("main", [x]):
        with builder.dataflow():
            wide = builder.emit_te(lambda x: topi.multiply(topi.cast(x, "float32"), 3.0), x)
            both = builder.emit_output(relax.Tuple([builder.emit_te(topi.cast, wide, dtype), wide, x]))
        builder.emit_func_output(both)
    exe = compile_module(builder.get(), TARGET)
    exe.save(tmp_path / "model.so")
    kind = array_type(dtype)
    array = np.random.default_rng(0).standard_normal((4, 32)).astype(kind)
    frozen, strided = array.copy(), np.repeat(array, 2, axis=1)[:, ::2]
    frozen.flags.writeable = False
    for each in (exe, load(tmp_path / "model.so")):
        for given in (array, frozen, strided):
            narrow, product, same = each(given)
            assert (narrow.dtype, product.dtype, same.dtype) == (kind, np.float32, kind)
            np.testing.assert_array_equal(product, array.astype("float32") * 3)
            np.testing.assert_array_equal(narrow, product.astype(kind))
            np.testing.assert_array_equal(same, array)
        with pytest.raises(InputError, match=rf"must be {dtype}, got float32; convert it with .astype\("):
            each(array.astype("float32"))


def test_names_of_any_kind(tmp_path: Path) -> None:
    case = programs.scalars()
    names = ("input.1", "a scale", "count/0", "mask:0")
    shapes = compile_module(case.mod, TARGET)
    meta = ModelMeta("m", tuple(TensorSpec(n, s.shape, s.dtype) for n, s in zip(names, shapes.inputs, strict=True)),
                     tuple(TensorSpec(f"out:{i}", s.shape, s.dtype) for i, s in enumerate(shapes.outputs)))
    compile_module(case.mod, TARGET, None, meta).save(tmp_path / "model.so")
    exe = load(tmp_path / "model.so")
    arrays = _inputs(exe.inputs)
    named = dict(zip(names, arrays, strict=True))
    _check(exe(**named), case.reference(*arrays))
    _check(exe(**dict(reversed(named.items()))), case.reference(*arrays))
    _check(exe(arrays[0], arrays[1], **{"mask:0": arrays[3], "count/0": arrays[2]}), case.reference(*arrays))
    assert [spec.name for spec in exe.outputs] == ["out:0", "out:1", "out:2"]


def test_arrays_of_any_memory(dense: tuple[Executable, Program]) -> None:
    exe, case = dense
    rng = np.random.default_rng(3)
    plain = rng.standard_normal((5, 24), dtype=np.float32)
    wide = rng.standard_normal((5, 48), dtype=np.float32)
    frozen = plain.copy()
    frozen.flags.writeable = False
    unaligned = np.empty(5 * 24 * 4 + 4, np.uint8)[4:].view(np.float32).reshape(5, 24)
    unaligned[...] = plain
    views = (plain, np.asfortranarray(plain), wide[:, ::2], plain[::-1], frozen, unaligned, plain.tolist())
    for view in views[:-1]:
        _check(exe(view), case.reference(np.asarray(view)))
    assert not frozen.flags.writeable  # and nothing wrote to it


def test_results_belong_to_the_caller(dense: tuple[Executable, Program]) -> None:
    exe, case = dense
    first, second = _inputs(exe.inputs, 1), _inputs(exe.inputs, 2)
    (before,) = exe(*first)
    kept = before.copy()
    (after,) = exe(*second)
    np.testing.assert_array_equal(before, kept)  # a later call does not reuse memory that was handed out
    before[...] = np.nan
    after[...] = np.nan
    _check(exe(*first), case.reference(*first))


def test_results_that_are_inputs_or_weights_are_copies() -> None:
    case = programs.many_results()
    exe = compile_module(case.mod, TARGET)
    (x,) = _inputs(exe.inputs)
    outputs = exe(x)
    assert not any(np.shares_memory(output, x) for output in outputs)
    for output in outputs:
        output[...] = np.nan
    _check(exe(x), case.reference(x))


def test_a_weight_that_is_not_aligned() -> None:
    memory = np.random.default_rng(5).standard_normal(4 * 8 + 1, dtype=np.float32)
    start = 1 if memory.ctypes.data % 64 == 0 else 0
    weight = memory[start : start + 32].reshape(4, 8)
    assert weight.ctypes.data % 64

    def body(builder: relax.BlockBuilder, params: list[relax.Var]) -> list[relax.Expr]:
        return [builder.emit_te(topi.add, params[0], relax.const(tvm_ffi.from_dlpack(weight)))]

    exe = compile_module(programs.program({"x": ((4, 8), "float32")}, body), TARGET)
    (x,) = _inputs(exe.inputs)
    _check(exe(x), [x + weight])


def test_threads_may_share_an_executable(dense: tuple[Executable, Program]) -> None:
    exe, case = dense
    wrong: list[int] = []

    def work(seed: int) -> None:
        for step in range(20):
            (x,) = _inputs(exe.inputs, 100 * seed + step)
            if not np.allclose(exe(x)[0], case.reference(x)[0], rtol=1e-4, atol=1e-4):
                wrong.append(seed)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_time_gives_one_figure_a_run(dense: tuple[Executable, Program]) -> None:
    exe, _ = dense
    times = exe.time(*_inputs(exe.inputs), repeats=7, warmup=1)
    assert len(times) == 7 and all(0 < t < 1 for t in times)


def test_a_profile_covers_the_functions() -> None:
    case = programs.dense(rows=64, size=256)
    exe = compile_module(case.mod, TARGET)
    (x,) = _inputs(exe.inputs)
    seconds = exe.profile(x, repeats=5)
    assert list(seconds) == ["matmul", "bias_relu"]
    assert all(0 < s < 1 for s in seconds.values())
    _check(exe(x), case.reference(x))  # and watching leaves the model as it was


def test_metadata_tells_what_it_was_made_of(dense: tuple[Executable, Program]) -> None:
    exe, _ = dense
    meta = exe.metadata
    assert meta["target"] == TARGET.canonical and meta["threads"] == 2 and meta["kind"] == "llvm"
    assert [f["name"] for f in meta["functions"]] == ["matmul", "bias_relu"]
    assert all(f["source"] == "seed" and not f["tuned"] and f["key"] for f in meta["functions"])
    assert meta["versions"]["tvm"] and meta["versions"]["llvm"] and meta["versions"]["mlc"]
    assert "Executable module for" in repr(exe) and "x: float32[5, 24]" in repr(exe)


def test_a_file_that_is_replaced_is_loaded_anew(tmp_path: Path) -> None:
    """The system's loader goes by the name of a file: a second load must not give the first one's code."""
    path = tmp_path / "model.so"
    first, second = programs.dense(), programs.twins()
    compile_module(first.mod, TARGET).save(path)
    old = load(path)
    compile_module(second.mod, TARGET).save(path)  # under the weights that `old` has mapped
    new = load(path)
    again = load(path)
    for exe, case in ((old, first), (new, second), (again, second)):
        arrays = _inputs(exe.inputs)
        _check(exe(*arrays), case.reference(*arrays))


#: tvm_ffi imports PyTorch where it is installed, which takes a second that these processes need not wait
_LEAN = "import sys; sys.modules['torch'] = None\n"

_FRESH = """
import sys
import numpy as np
import mlc
exe = mlc.load(sys.argv[1])
x = np.random.default_rng(0).standard_normal((5, 24), dtype=np.float32)
(y,) = exe(x)
assert "tvm" not in sys.modules, "loading must not need the compiler"
np.save(sys.argv[2], y)
import tvm  # coming later, it must find the library loaded and change nothing
assert (exe(x)[0] == y).all()
"""


def _check_elsewhere(script: str, dense: tuple[Executable, Program], folder: Path) -> None:
    """A process of its own runs ``script ARTIFACT RESULT``."""
    exe, case = dense
    exe.save(folder / "model.so")
    subprocess.run([sys.executable, "-c", _LEAN + script, folder / "model.so", folder / "y.npy"], check=True,
                   cwd=folder)
    x = np.random.default_rng(0).standard_normal((5, 24), dtype=np.float32)
    _check([np.load(folder / "y.npy")], case.reference(x))


def test_a_fresh_process_loads_with_the_runtime_alone(dense: tuple[Executable, Program], tmp_path: Path) -> None:
    _check_elsewhere(_FRESH, dense, tmp_path)


_PLAIN_TVM = """
import json, struct, sys
import numpy as np
import tvm
from tvm import relax

path, result = sys.argv[1:]
data = open(path, "rb").read()
(headers,), (size, count) = struct.unpack_from("<Q", data, 0x28), struct.unpack_from("<HH", data, 0x3A)
start = -(-(headers + size * count) // 4096) * 4096
magic, version, length, total, checksum = struct.unpack_from("<8sI4xQQQ", data, start)
meta = json.loads(data[start + 40 : start + 40 + length])
first = -(-(start + 40 + length) // 4096) * 4096
weights = [np.frombuffer(data, w["dtype"], w["bytes"] // np.dtype(w["dtype"]).itemsize, first + w["offset"])
           .reshape(w["shape"]) for w in meta["weights"]]

vm = relax.VirtualMachine(tvm.runtime.load_module(path), tvm.cpu())
x = np.random.default_rng(0).standard_normal((5, 24), dtype=np.float32)
np.save(result, vm["main"](*[tvm.runtime.tensor(a) for a in (x, *weights)]).numpy())
"""


def test_plain_tvm_runs_an_artifact(dense: tuple[Executable, Program], tmp_path: Path) -> None:
    """Nothing of mlc is needed: the file is a TVM module, and the weights after it are found as documented."""
    _check_elsewhere(_PLAIN_TVM, dense, tmp_path)


_THREADS = """
import threading
import numpy as np
import tvm
from tvm import relax
from tvm.script import tirx as T
from mlc.artifact import compile_module
from mlc.target import resolve

seen = set()
tvm.register_global_func("mlc.test.seen", lambda i: seen.add(threading.get_native_id()) or 0)

@T.prim_func(private=True, s_tir=True)
def note(x: T.Buffer((64,), "float32"), y: T.Buffer((64,), "float32")):
    T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True})
    for i in T.parallel(64):
        with T.sblock("note"):
            v = T.axis.spatial(64, i)
            T.evaluate(T.call_packed("mlc.test.seen", v))
            y[v] = x[v] + T.float32(1)

def compiled(threads):
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((64,), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            call = relax.call_tir(builder.add_func(note, "note"), (x,), relax.TensorType((64,), "float32"))
            result = builder.emit_output(call)
        builder.emit_func_output(result)
    return compile_module(builder.finalize(), resolve("native", threads=threads))

used = []
one, three = compiled(1), compiled(3)
for exe in (one, three, one, three):
    seen.clear()
    exe(np.zeros(64, np.float32))
    used.append(len(seen))
print(*used)
tvm.get_global_func("runtime.config_threadpool")(1, 1)  # somebody else
seen.clear()
three(np.zeros(64, np.float32))
print(len(seen))
"""


def test_code_runs_on_as_many_threads_as_it_was_made_for(tmp_path: Path) -> None:
    """A program of one thread that came first does not take the others' threads away, nor does anybody else."""
    clean = {k: v for k, v in os.environ.items() if k not in ("TVM_NUM_THREADS", "OMP_NUM_THREADS")}
    script = tmp_path / "script.py"  # a file, since TVMScript reads its own source
    script.write_text(_LEAN + _THREADS)
    done = subprocess.run([sys.executable, script], env={**clean, "MLC_THREADS": "3"}, check=True,
                          capture_output=True, text=True)
    assert done.stdout.split() == ["1", "3", "1", "3", "3"]
