"""Arrays of any library go in and out without a copy, and what does not fit is refused before anything is written."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from onnx import TensorProto, helper
from tvm import relax, topi

import mlc
from mlc.artifact import Executable, compile_module, emit
from mlc.artifact.devices import CpuDevice
from mlc.artifact.inputs import InputSlot
from mlc.artifact.memory import INTO, AddEntryInto
from mlc.errors import InputError
from mlc.frontend.model import TensorSpec, array_type
from mlc.shapes import Range
from mlc.target import resolve
from mlc.testing import programs

torch = pytest.importorskip("torch")

TARGET = resolve("native", threads=2)
CASES = (programs.dense, programs.many_results, programs.scalars, programs.constant_result, programs.twins,
         programs.two_of_one)


@pytest.fixture(scope="module")
def dense() -> tuple[Executable, programs.Program]:
    case = programs.dense()
    return compile_module(case.mod, TARGET), case


def _arrays(exe: Executable, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)

    def one(spec: TensorSpec) -> np.ndarray:
        values = rng.standard_normal(spec.shape) * 5
        return np.asarray(values > 0 if spec.dtype == "bool" else values).astype(array_type(spec.dtype))

    return [one(spec) for spec in exe.inputs]


def _unaligned(shape: tuple[int, ...]) -> np.ndarray:
    memory = np.zeros(int(np.prod(shape)) * 4 + 128, np.uint8)
    start = -memory.ctypes.data % 64 + 4
    return memory[start : start + int(np.prod(shape)) * 4].view(np.float32).reshape(shape)


@pytest.fixture()
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets an entry for each result that is copied into a caller's memory."""
    made: list[int] = []
    copy = CpuDevice.copy

    def counted(self: CpuDevice, index: int, tensor: Any, out: Any) -> None:
        made.append(tensor.numel())
        copy(self, index, tensor, out)

    monkeypatch.setattr(CpuDevice, "copy", counted)
    return made


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64", "bool"])
def test_tensors_of_other_libraries_are_read_where_they_are(dtype: str) -> None:
    x = (torch.randn(6, 10) * 5).to(getattr(torch, dtype))
    slot = InputSlot(TensorSpec("x", (6, 10), dtype))
    assert slot.tensor(x).data_ptr() == x.data_ptr()
    ours = slot.tensor(x)
    assert slot.tensor(ours) is ours
    assert slot.tensor(tvm.runtime.from_dlpack(x)).data_ptr() == x.data_ptr()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_that_lie_badly_are_copied(dtype: str) -> None:
    slot = InputSlot(TensorSpec("x", (6, 10), dtype))
    whole = torch.randn(12, 21).to(getattr(torch, dtype))
    for x in (whole[:10, :6].t(), whole[::2, 1:21:2], whole[0, 0].expand(6, 10), whole.reshape(-1)[1:61].view(6, 10)):
        tensor = slot.tensor(x)
        assert tensor.data_ptr() != x.data_ptr() and tensor.data_ptr() % 64 == 0
        assert torch.equal(torch.from_dlpack(tensor), x)


def test_results_share_memory_with_what_the_code_wrote(dense: tuple[Executable, programs.Program]) -> None:
    exe, case = dense
    x = torch.randn(5, 24)
    (y,) = exe(x)
    assert y.ctypes.data % 64 == 0, "a copy of numpy's would lie anywhere"
    tensor = torch.from_dlpack(y)
    assert tensor.data_ptr() == y.ctypes.data
    kept = tensor.clone()
    exe(torch.randn(5, 24))
    assert torch.equal(tensor, kept)
    np.testing.assert_allclose(y, case.reference(x.numpy())[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_results_in_the_callers_memory(make: Callable[[], programs.Program], copies: list[int]) -> None:
    case = make()
    exe = compile_module(case.mod, TARGET)
    arrays, outputs = _arrays(exe), exe.empty_outputs()
    exe.run(arrays, outputs)
    direct = len(outputs) - len(copies)
    named = dict(zip((spec.name for spec in exe.outputs), map(np.zeros_like, exe.empty_outputs()), strict=True))
    aligned = {name: out for (name, _), out in zip(named.items(), exe.empty_outputs(), strict=True)}
    exe.run({spec.name: array for spec, array in zip(exe.inputs, arrays, strict=True)}, aligned)
    for wanted, one, other in zip(case.reference(*arrays), outputs, aligned.values(), strict=True):
        np.testing.assert_allclose(one, wanted, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(one, other)
    # an input and a weight handed through, and what is another result's memory, are the only copies
    assert direct == (2 if make is programs.many_results else len(outputs))


def test_torch_writes_nothing_itself(dense: tuple[Executable, programs.Program], copies: list[int]) -> None:
    exe, case = dense
    x, y = torch.randn(5, 24), torch.empty(5, 24)
    exe.run((x,), (y,))
    assert not copies
    np.testing.assert_allclose(y.numpy(), case.reference(x.numpy())[0], rtol=1e-5, atol=1e-5)


def test_results_of_16_bits() -> None:
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType((4, 32), "bfloat16"))
    with builder.function("main", [x]):
        with builder.dataflow():
            wide = builder.emit_te(lambda x: topi.multiply(topi.cast(x, "float32"), 3.0), x)
            result = builder.emit_output(builder.emit_te(topi.cast, wide, "bfloat16"))
        builder.emit_func_output(result)
    exe = compile_module(builder.get(), TARGET)
    x, y = torch.randn(4, 32).bfloat16(), torch.empty(4, 32, dtype=torch.bfloat16)
    exe.run([x], [y])
    assert torch.equal(y, (x.float() * 3).bfloat16())
    (other,) = exe.empty_outputs()
    exe.run([x], [other])
    assert (other.astype(np.float32) == y.float().numpy()).all()


def test_code_without_the_second_entry(monkeypatch: pytest.MonkeyPatch, copies: list[int]) -> None:
    """As former versions wrote: the results are copied."""
    monkeypatch.setattr(emit, "FINALISE", tuple(each for each in emit.FINALISE if each is not AddEntryInto))
    case = programs.many_results()
    exe = compile_module(case.mod, TARGET)
    arrays, outputs = _arrays(exe), exe.empty_outputs()
    exe.run(arrays, outputs)
    assert not exe._machine.implements_function(INTO) and len(copies) == len(outputs)
    for have, wanted in zip(outputs, case.reference(*arrays), strict=True):
        np.testing.assert_allclose(have, wanted, rtol=1e-5, atol=1e-5)


def test_eight_threads_with_memory_of_their_own(dense: tuple[Executable, programs.Program]) -> None:
    """Whoever calls keeps what came back, whatever others call meanwhile."""
    exe, case = dense
    wrong: list[int] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        xs = [rng.standard_normal((5, 24), dtype=np.float32) for _ in range(4)]
        wanted = [case.reference(x)[0] for x in xs]
        (out,), kept = exe.empty_outputs(), exe(xs[0])[0]
        for step in range(2000):
            x, want = xs[step % 4], wanted[step % 4]
            if step % 2:
                exe.run([x], [out])
            have = out if step % 2 else exe(x)[0]
            if not np.allclose(have, want, rtol=1e-4, atol=1e-4):
                wrong.append(seed)
        if not np.allclose(kept, wanted[0], rtol=1e-4, atol=1e-4):
            wrong.append(seed)

    group = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in group:
        thread.start()
    for thread in group:
        thread.join()
    assert not wrong


def _line(exe: Executable, inputs: Any, outputs: Any) -> str:
    with pytest.raises(InputError) as caught:
        exe.run(inputs, outputs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_outputs_that_do_not_fit(dense: tuple[Executable, programs.Program]) -> None:
    exe, _ = dense
    x, (y,) = torch.randn(5, 24), exe.empty_outputs()
    y[...] = 7
    frozen = y.view()
    frozen.flags.writeable = False
    name = f"output {exe.outputs[0].name}"
    cases: list[tuple[Any, str]] = [
        ([y[:4]], f"{name} must have shape [5, 24], got [4, 24]; compile the model again for this shape"),
        ([torch.empty(24, 5)], f"{name} must have shape [5, 24], got [24, 5]; reshape it"),
        ([y.view(np.int32)], f"{name} must be float32, got int32; empty_outputs() makes what fits"),
        ([torch.empty(5, 24).double()], f"{name} must be float32, got float64; empty_outputs() makes what fits"),
        ([torch.empty(24, 5).t()], f"{name} must be contiguous, in rows, got other strides; "
                                   "empty_outputs() makes what fits"),
        ([np.asfortranarray(y)], f"{name} must be contiguous, in rows, got other strides; "
                                 "empty_outputs() makes what fits"),
        ([_unaligned((5, 24))], f"{name} must start at a multiple of 64 bytes, got memory that starts 4 bytes after "
                                "one; empty_outputs() makes what fits"),
        ([frozen], f"{name} must be writable, got an array that is read-only; give a copy"),
        ([[1.0]], f"{name} must be an array or a tensor with __dlpack__, got list; empty_outputs() makes what fits"),
        ([torch.empty(5, 24, device="meta")], f"{name} must be an array in this machine's memory, got Tensor"),
        ([torch.empty(5, 24).requires_grad_()], f"{name} must be a tensor that needs no gradient"),
        ([], f"every output must be given, but {exe.outputs[0].name} is missing; the model gives"),
        ([y, y], "the model gives 1 outputs"),
        ({"nobody": y}, f"an output's name must be one of {exe.outputs[0].name}, got nobody"),
        (y, "outputs must be a list or a dictionary of arrays, got ndarray; put it in one"),
    ]
    for outputs, line in cases:
        assert _line(exe, [x], outputs).startswith(line)
    assert (y == 7).all(), "nothing is written before everything is checked"
    assert _line(exe, x, [y]) == "inputs must be a list or a dictionary of arrays, got Tensor; put it in one"


def test_memory_that_is_given_twice(dense: tuple[Executable, programs.Program]) -> None:
    exe, _ = dense
    (y,) = exe.empty_outputs()
    assert "must have memory of its own, got that of input x;" in _line(exe, [y], [y])
    both = compile_module(programs.many_results().mod, TARGET)
    outputs = both.empty_outputs()
    assert "got that of output output_0;" in _line(both, [_arrays(both)[0]], [outputs[0], outputs[0], *outputs[2:]])


def test_inputs_of_other_libraries_that_do_not_fit(dense: tuple[Executable, programs.Program]) -> None:
    exe, _ = dense
    for x, line in (
        (torch.randn(4, 24), "input x must have shape [5, 24], got [4, 24]"),
        (torch.randn(5, 24).double(), "input x must be float32, got float64; convert it with .astype('float32')"),
        (torch.randn(5, 24, dtype=torch.complex64), "input x must be float32, got torch.complex64; convert it"),
        (torch.randn(5, 24, requires_grad=True), "input x must be a tensor that needs no gradient"),
        (torch.empty(5, 24, device="meta"), "input x must be an array in this machine's memory, got Tensor"),
        (torch.randn(5, 24).to_sparse(), "input x must be an array in this machine's memory, got Tensor"),
    ):
        with pytest.raises(InputError) as caught:
            exe(x)
        assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_an_input_may_have_no_elements(library: str) -> None:
    """What its strides are is left to each library; a model that is given a past has none at its first call."""
    sizes = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 2, size, 4])
             for name, size in (("past", "before"), ("new", "now"), ("both", "after"))]
    node = helper.make_node("Concat", ["past", "new"], ["both"], axis=2)
    graph = helper.make_graph([node], "grown", sizes[:2], sizes[2:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    shapes = {"past": (1, 2, Range(0, 8), 4), "new": (1, 2, Range(1, 4), 4)}
    exe = mlc.compile(model, log=False, threads=1, shapes=shapes)
    new = np.random.default_rng(0).standard_normal((1, 2, 3, 4), np.float32)
    for before in (0, 5, 0):
        past = np.ones((1, 2, before, 4), np.float32)
        given = past if library == "numpy" else torch.from_numpy(past)
        np.testing.assert_array_equal(exe(given, new)[0], np.concatenate([past, new], axis=2))


def test_code_for_cpus_has_no_stream(dense: tuple[Executable, programs.Program]) -> None:
    exe, _ = dense
    out = exe.empty_outputs()
    with pytest.raises(InputError) as caught:
        exe.run(_arrays(exe), out, stream=0)
    assert str(caught.value) == "a stream is a GPU's, but the model was compiled for a CPU; leave it out"
