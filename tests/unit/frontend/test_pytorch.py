"""PyTorch modules: the same outputs as the module itself, and clear refusals."""

from __future__ import annotations

from functools import partial

import numpy as np
import onnx
import pytest
import torch
import tvm
from torch import nn
from torch.nn import functional as F
from tvm import relax

from mlc.errors import ModelError, UnsupportedOperators, UsageError
from mlc.frontend import load_model
from mlc.frontend.pytorch import export_module, to_onnx


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, groups=8, padding=1)
        self.dropout = nn.Dropout()
        self.head = nn.Linear(8, 10)

    def forward(self, image):
        x = F.relu(self.norm(self.conv(image)))
        x = x + F.hardswish(self.depthwise(x))
        return self.head(self.dropout(F.adaptive_avg_pool2d(x, 1).flatten(1))), x


class Recurrent(nn.Module):
    def __init__(self, projected: int = 0) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, batch_first=True, proj_size=projected)

    def forward(self, sequence):
        return self.lstm(sequence)[0]


@pytest.mark.parametrize(
    ("build", "shape", "name"),
    [
        (ConvNet, (1, 3, 12, 12), "image"),
        (Recurrent, (1, 5, 8), "sequence"),
        (partial(Recurrent, projected=4), (1, 3, 8), "sequence"),
    ],
)
def test_same_outputs_as_the_module(build, shape, name):
    torch.manual_seed(0)
    module, example = build(), torch.randn(shape)  # in training mode, as a user would have it
    imported = load_model(module, example_inputs=(example,))
    assert module.training
    assert [(s.name, s.shape, s.dtype) for s in imported.inputs] == [(name, shape, "float32")]
    with torch.no_grad():
        expected = module.eval()(example)
    expected = expected if isinstance(expected, tuple) else (expected,)
    built = tvm.compile(imported.mod, tvm.target.Target("llvm"))
    result = relax.VirtualMachine(built, tvm.cpu())["main"](tvm.runtime.tensor(example.numpy()))
    results = [result] if isinstance(result, tvm.runtime.Tensor) else list(result)
    for ours, theirs, spec in zip(results, expected, imported.outputs, strict=True):
        assert spec.shape == tuple(theirs.shape)
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("both", [False, True])
def test_recurrent_layers_are_one_operator_each(kind, both):
    """Which computes the same elsewhere."""
    runtime = pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    module = getattr(nn, kind)(4, 6, 2, bidirectional=both, batch_first=both, bias=both)
    example = torch.randn(5, 3, 4)
    model = to_onnx(export_module(module, (example,), "layers"), "layers")
    assert [node.op_type for node in model.graph.node if node.op_type in (kind, "MatMul", "Gemm")] == [kind] * 2
    session = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    with torch.no_grad():
        output, states = module(example)
    wanted = [output, *(states if kind == "LSTM" else [states])]
    for got, tensor in zip(session.run(None, {"input": example.numpy()}), wanted, strict=True):
        np.testing.assert_allclose(got, tensor.numpy(), rtol=1e-4, atol=1e-5)


def test_exported_program_is_accepted():
    program = torch.export.export(nn.Linear(4, 3), (torch.randn(2, 4),))
    assert load_model(program).outputs[0].shape == (2, 3)


def test_unsupported_operators_are_listed_together():
    class Odd(nn.Module):
        def forward(self, x):
            return torch.linalg.det(x) + torch.special.bessel_j0(x).sum() + torch.histc(x, 4).sum()

    with pytest.raises(UnsupportedOperators) as caught:
        load_model(Odd(), example_inputs=(torch.randn(3, 3),))
    assert len(caught.value.operators) == 2, "histograms are translated"


@pytest.mark.parametrize(("function", "given", "said"), [
    (lambda x: torch.unique(x).sum(), torch.ones(3), "how many it is given, NonZero counts in each call"),
    (lambda x: torch.bincount(x, minlength=5), torch.arange(3), "depend on the numbers of its inputs x; make these"),
    (torch.linalg.inv, torch.eye(3), "but 1 are not: aten.linalg_inv_ex.default (used by linalg_inv_ex); replace"),
], ids=["unique", "bincount", "inv"])
def test_what_is_said_is_of_the_model(function, given, said):
    """Not of how the second importer takes it apart, nor of an order of effects that PyTorch writes down."""
    class Called(nn.Module):
        def forward(self, x):
            return function(x)

    with pytest.raises(ModelError) as error:
        load_model(Called(), example_inputs=(given,))
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("examples", [None, (1,), ({"x": 2},)])
def test_example_inputs_must_be_tensors(examples):
    with pytest.raises(UsageError, match="example"):
        load_model(nn.ReLU(), example_inputs=examples)


def test_shapes_are_for_onnx_only():
    with pytest.raises(UsageError, match="example_inputs"):
        load_model(nn.ReLU(), example_inputs=(torch.randn(2),), shapes={"x": (2,)})


def test_weights_are_of_one_type_where_norms_are_folded_into_convolutions_of_bfloat16():
    """PyTorch's exporter leaves them in float32, which nothing multiplies with bfloat16."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.ConvTranspose2d(4, 2, 2)).eval()
    nn.init.uniform_(module[1].running_var, 0.5, 2)
    model = to_onnx(export_module(module.bfloat16(), (torch.randn(1, 3, 6, 6).bfloat16(),), "m"), "m")
    assert [node.op_type for node in model.graph.node] == ["Conv", "Relu", "ConvTranspose"]
    assert {tensor.data_type for tensor in model.graph.initializer} == {onnx.TensorProto.BFLOAT16}
    folded = onnx.numpy_helper.to_array(next(t for t in model.graph.initializer if len(t.dims) == 4))
    scale = (module[1].weight / (module[1].running_var.float() + 1e-5).sqrt()).detach()
    wanted = (module[0].weight.float() * scale[:, None, None, None]).detach()
    np.testing.assert_allclose(folded.astype("float32"), wanted.float().numpy(), rtol=2e-2)


@pytest.mark.parametrize("draw", [lambda x: torch.bernoulli(torch.zeros_like(x), p=0.5), torch.rand_like],
                         ids=["bernoulli", "rand_like"])
def test_random_numbers_are_refused(draw):
    """Of constants they would be drawn once, when the model is compiled."""
    class Drawn(nn.Module):
        def forward(self, x):
            return x * draw(x)

    with pytest.raises(ModelError, match="draws random numbers; make them an input") as error:
        load_model(Drawn(), example_inputs=(torch.ones(8),))
    assert "\n" not in str(error.value)
