"""``torch.compile(backend="mlc")`` computes what eager PyTorch does, and leaves to it what it cannot compile."""

from __future__ import annotations

import configparser
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch_runs import check, run  # noqa: E402

import mlc  # noqa: E402
from mlc import torch_backend  # noqa: E402
from mlc.errors import MlcError, TargetError, UsageError  # noqa: E402
from mlc.networks.architectures import SMALL_ARCHITECTURES  # noqa: E402
from mlc.shapes import Free  # noqa: E402
from mlc.torch_backend import compiler  # noqa: E402

#: architectures of which every graph is compiled
_WHOLE = ("convnextv2", "vit", "roberta")


class Mixed(nn.Module):
    """A convolution, norms, attention; results that are views, transposed, the input itself, and no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.scale = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.LayerNorm(8)
        nn.init.uniform_(self.norm.running_mean)
        nn.init.uniform_(self.norm.running_var, 0.5, 2)

    def forward(self, x: torch.Tensor, times: int = 2) -> dict[str, Any]:
        y = self.scale(self.norm(self.conv(x)).relu().flatten(2).transpose(1, 2))
        q = y.view(y.shape[0], -1, 2, 4).transpose(1, 2)
        z = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        return {"z": z * times, "t": z.transpose(1, 3), "v": x.view(-1), "x": x, "n": times, "none": None}


def test_a_model_is_one_graph_and_right(compiled: list[mlc.Executable]) -> None:
    model = Mixed().eval()
    for _ in range(2):
        x = torch.randn(2, 3, 8, 8)
        got, eagerly = run(model, x)
        check(got, model(x))
        assert got["x"] is x and got["v"].data_ptr() == x.data_ptr()
        assert not eagerly
    assert len(compiled) == 1 and len(compiled[0].inputs) == 1, "weights and statistics are inside"


def test_inference_mode() -> None:
    model = Mixed().eval()
    with torch.inference_mode():
        x = torch.randn(2, 3, 8, 8)
        got, eagerly = run(model, x)
        check(got, model(x))
    assert not eagerly


def test_weights_that_count_no_changes_are_inputs(compiled: list[mlc.Executable]) -> None:
    with torch.inference_mode():
        linear = nn.Linear(8, 4)
        fast, x = torch.compile(linear, backend="mlc"), torch.randn(2, 8)
        for _ in range(3):
            check(fast(x), linear(x))
            linear.weight.mul_(2.0)
    assert len(compiled) == 1


def test_one_artifact_serves_what_turns_out_to_be_free(compiled: list[mlc.Executable]) -> None:
    linear = nn.Linear(8, 4)
    fast = torch.compile(linear, backend="mlc")
    for rows in (2, 3, 5, 300, 3, 2):  # Dynamo sees at the second that the size is free
        x = torch.randn(rows, 8)
        check(fast(x), linear(x))
    assert [exe.inputs[0].free for exe in compiled] == [False, True]


@pytest.mark.slow
def test_several_threads_compile_at_once(compiled: list[mlc.Executable]) -> None:
    """While one traces, another comes with sizes that Dynamo has not seen."""
    models = [nn.Sequential(nn.Linear(8, n), nn.ReLU(), nn.Linear(n, 8)).eval() for n in range(3, 6)]
    fast = [torch.compile(each, backend="mlc", dynamic=True) for each in models]

    def call(number: int) -> None:
        with torch.no_grad():
            for batch in range(number + 2, number + 5):
                x = torch.randn(batch, 8)
                for turn in range(len(models)):
                    which = (turn + number) % len(models)
                    check(fast[which](x), models[which](x))

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(call, number) for number in range(4)]:
            done.result()
    assert compiled


def test_marked_dimensions_are_free_at_once(compiled: list[mlc.Executable]) -> None:
    model = Mixed().eval()
    fast = torch.compile(model, backend="mlc")
    for batch in (3, 2, 7, 16):
        x = torch.randn(batch, 3, 8, 8)
        torch._dynamo.mark_dynamic(x, 0)
        check(fast(x), model(x))
    assert len(compiled) <= 2  # the range has a second artifact where Dynamo's guards end the first one's
    for exe in compiled:
        assert [size.name for size in exe.inputs[0].shape if isinstance(size, Free)] and len(exe.inputs) == 1


def test_a_marked_range_is_that_of_the_artifact(compiled: list[mlc.Executable]) -> None:
    linear = nn.Linear(8, 4)
    fast = torch.compile(linear, backend="mlc")
    for rows in (3, 6, 4):
        x = torch.randn(rows, 8)
        torch._dynamo.mark_dynamic(x, 0, min=3, max=6)
        check(fast(x), linear(x))
    (exe,) = compiled
    assert isinstance(free := exe.inputs[0].shape[0], Free) and (free.range.low, free.range.high) == (3, 6)


def test_sizes_that_are_computed_with(compiled: list[mlc.Executable]) -> None:
    """Two free sizes, one of them in arithmetic, in a shape, and in a result that is no tensor."""

    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        joined = torch.cat([x, y]).view(-1, 2, 4).sum(1)
        return joined, x.shape[0] * 3

    fast = torch.compile(function, backend="mlc")
    for first, second in ((4, 6), (3, 9), (11, 2), (4, 6)):
        x, y = torch.randn(first, 8), torch.randn(second, 8)
        for tensor in (x, y):
            torch._dynamo.mark_dynamic(tensor, 0)
        check(fast(x, y), function(x, y))
    assert len(compiled) == 1


@pytest.mark.parametrize("numbers", [range(2, 16), [n + 0.5 for n in range(14)]], ids=["whole", "real"])
def test_numbers_that_turn_out_to_be_free_are_inputs(numbers: Any, compiled: list[mlc.Executable]) -> None:
    def function(x: torch.Tensor, n: Any) -> torch.Tensor:
        return x * n + n

    fast, x = torch.compile(function, backend="mlc"), torch.randn(3, 4)
    for n in numbers:
        check(fast(x, n), function(x, n))
    assert len(compiled) == 2


def test_numbers_that_are_divided_are_rounded_as_in_python(compiled: list[mlc.Executable]) -> None:
    def function(x: torch.Tensor, n: int) -> torch.Tensor:
        return x + n // 3

    fast, x = torch.compile(function, backend="mlc"), torch.randn(3, 4)
    for n in (4, 2, -7):
        check(fast(x, n), function(x, n))
    assert len(compiled) == 3


def test_a_result_that_lies_in_an_input_where_a_number_says() -> None:
    fast, x = torch.compile(lambda x, n: x[n % 3], backend="mlc"), torch.randn(3, 4)
    for n in (2, 3, 7, 8):
        check(fast(x, n), x[n % 3])


def test_too_many_sizes_run_eagerly(monkeypatch: pytest.MonkeyPatch, compiled: list[mlc.Executable]) -> None:
    monkeypatch.setattr(compiler, "_MOST_SIZES", 2)
    monkeypatch.setattr(compiler, "symbols_of", lambda _graph: {})  # as for a graph that needs numbers
    linear = nn.Linear(8, 4)
    fast = torch.compile(linear, backend="mlc", dynamic=True)
    with pytest.warns(UserWarning, match="must be called with at most 2 sets of sizes") as caught:
        for rows in range(2, 6):
            x = torch.randn(rows, 8)
            check(fast(x), linear(x))
    assert len(compiled) == 2 and len([w for w in caught if "runs eagerly" in str(w.message)]) == 1


def test_results_keep_their_values() -> None:
    fast = torch.compile(nn.Linear(8, 4), backend="mlc")
    first = fast(torch.randn(3, 8))
    kept = first.clone()
    fast(torch.randn(3, 8))
    assert torch.equal(first, kept)


def test_updates_in_place() -> None:
    def function(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[0] = 3
        state.add_(y.sum(0))
        return state.relu()

    x, mine, eager = torch.randn(4, 6), torch.zeros(6), torch.zeros(6)
    got, eagerly = run(function, x, mine)
    check(got, function(x, eager))
    check(mine, eager)
    assert not eagerly


def test_a_graph_break_leaves_python_to_python(
    compiled: list[mlc.Executable], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)

    def function(x: torch.Tensor) -> torch.Tensor:
        y = first(x).relu()
        print("in between")
        return second(y)

    x = torch.randn(3, 8)
    got, eagerly = run(function, x)
    assert capsys.readouterr().out == "in between\n"
    check(got, function(x))
    assert len(compiled) == 2 and not eagerly


def test_an_operator_that_is_unknown_is_named_once() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.svd(x)[1] + 1

    x = torch.randn(4, 4)
    fast = torch.compile(function, backend="mlc")
    with pytest.warns(UserWarning, match=r"runs eagerly: .*aten\._linalg_svd") as caught:
        for _ in range(3):
            check(fast(x), function(x))
    assert len(caught) == 1 and "\n" not in str(caught[0].message)


def test_random_numbers_stay_random() -> None:
    fast, x = torch.compile(lambda x: x + torch.rand_like(x), backend="mlc"), torch.zeros(4)
    with pytest.warns(UserWarning, match=r"aten\.rand_like.* draws random numbers"):
        assert not torch.equal(fast(x), fast(x))


def test_complex_numbers_run_eagerly() -> None:
    x = torch.randn(4)
    got, eagerly = run(lambda x: torch.complex(x, x), x)
    assert torch.equal(got, torch.complex(x, x)) and len(eagerly) == 1


def test_training_runs_eagerly_and_learns(compiled: list[mlc.Executable]) -> None:
    linear, x = nn.Linear(8, 4), torch.randn(3, 8)
    with torch.enable_grad():
        got, eagerly = run(linear, x)
        got.sum().backward()
    torch.testing.assert_close(linear.weight.grad, x.sum(0).expand(4, 8))
    assert not compiled and len(eagerly) == 1 and "call it under torch.inference_mode()" in eagerly[0]


def test_weights_that_change_are_seen(compiled: list[mlc.Executable]) -> None:
    linear, x = nn.Linear(8, 4), torch.randn(3, 8)
    fast = torch.compile(linear, backend="mlc")
    check(fast(x), linear(x))
    linear.weight.mul_(2)
    check(fast(x), linear(x))
    linear.load_state_dict(nn.Linear(8, 4).state_dict())
    check(fast(x), linear(x))
    linear.bias = nn.Parameter(torch.randn(4))
    check(fast(x), linear(x))
    assert len(compiled) == 4
    linear.bias.data = torch.randn(4)
    check(fast(x), linear(x))


@pytest.mark.parametrize("change", [
    lambda w: w.data.add_(1), lambda w: w.data.copy_(torch.randn(64, 8)), lambda w: w.detach().numpy().__imul__(2)])
def test_weights_that_change_uncounted_are_seen(change: Callable[..., Any]) -> None:
    """PyTorch does not count what is written through ``.data`` and through arrays."""
    linear, x = nn.Linear(8, 64), torch.randn(3, 8)
    fast = torch.compile(linear, backend="mlc")
    check(fast(x), linear(x))
    version = linear.weight._version
    change(linear.weight)
    check(fast(x), linear(x))
    assert linear.weight._version == version, "it must not be counted, or this tests nothing"


def test_steps_of_fused_optimizers_are_seen() -> None:
    """PyTorch does not count them; here they change a row of many, which no sample of the elements shows."""
    table, ids = nn.Embedding(997, 3), torch.tensor([500])
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0, fused=True)
    fast = torch.compile(table, backend="mlc")
    for _ in range(3):
        check(fast(ids), table(ids))
        with torch.enable_grad():
            table(ids).sum().backward()
        optimizer.step()


def test_weights_that_are_said_to_change_are_seen() -> None:
    table, ids = nn.Embedding(997, 3), torch.tensor([500])
    fast = torch.compile(table, backend="mlc")
    check(fast(ids), table(ids))
    table.weight.data[500] = 5
    torch.autograd.graph.increment_version(table.weight)
    check(fast(ids), table(ids))


def test_statistics_that_each_call_updates_become_inputs(compiled: list[mlc.Executable]) -> None:
    mine, eager = (nn.BatchNorm1d(8) for _ in range(2))
    fast = torch.compile(mine, backend="mlc")
    for _ in range(6):
        x = torch.randn(5, 8)
        check(fast(x), eager(x))
        check((mine.running_mean, mine.running_var), (eager.running_mean, eager.running_var))
    assert len(compiled) == 3 and [len(exe.inputs) for exe in compiled] == [1, 1, 4]


def test_equal_graphs_are_compiled_once(compiled: list[mlc.Executable]) -> None:
    first, second, other = (nn.Linear(8, 4) for _ in range(3))
    second.load_state_dict(first.state_dict())
    x = torch.randn(3, 8)
    fast = {linear: torch.compile(linear, backend="mlc") for linear in (first, second, other)}
    for _ in range(2):  # and none of them takes the place of another
        for linear in fast:
            check(fast[linear](x), linear(x))
    assert len(compiled) == 2


def test_graphs_that_differ_in_a_branch_alone_are_two(compiled: list[mlc.Executable]) -> None:
    x = torch.randn(3, 4)
    for function in (lambda which, x: torch.cond(which, lambda x: x * 2, lambda x: x - 1, (x,)),
                     lambda which, x: torch.cond(which, lambda x: x * 3, lambda x: x - 1, (x,))):
        got, eagerly = run(function, torch.tensor(True), x)
        check(got, function(torch.tensor(True), x))
        assert not eagerly
    assert len(compiled) == 2


@pytest.mark.parametrize("options, error, line", [
    ({"sconds": 3}, UsageError, "an option of the backend mlc must be one of target, threads, log, seconds, trials, "
                                "got sconds"),
    ({"seconds": -1}, UsageError, "the option seconds of the backend mlc must be a number above zero, got -1"),
    ({"threads": "2"}, UsageError, "the option threads of the backend mlc must be a number above zero, got '2'"),
    ({"log": 3}, UsageError, "the option log of the backend mlc must be text, got 3"),
    ({"target": "nowhere"}, TargetError, "the target must be one that `mlc targets` lists, got 'nowhere'"),
])
def test_wrong_options(options: dict[str, Any], error: type[MlcError], line: str) -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        run(lambda x: x + 1, torch.ones(2), options=options)
    inner = caught.value.inner_exception
    assert type(inner) is error and str(inner).startswith(line) and "\n" not in str(inner)


def test_a_mode_is_refused() -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="must be called without a mode, got max-auto"):
        run(lambda x: x + 1, torch.ones(2), mode="max-autotune")


@pytest.mark.alone
def test_options_tune(tmp_path: Path) -> None:
    linear, x, log = nn.Linear(64, 64), torch.randn(16, 64), tmp_path / "own.db"
    got, eagerly = run(linear, x, options={"trials": 4, "log": str(log), "threads": 1})
    check(got, linear(x))
    assert not eagerly
    from mlc.log import TuningLog

    with TuningLog(log) as records:
        assert records.count() > 0


def test_the_entry_point_leads_to_the_backend() -> None:
    parser = configparser.ConfigParser()
    parser.read(Path(mlc.__file__).parents[1] / "setup.cfg")
    name, _, value = parser["options.entry_points"]["torch_dynamo_backends"].strip().partition(" = ")
    assert EntryPoint(name, value, "torch_dynamo_backends").load() is torch_backend.backend
    assert name == "mlc" and "mlc" in torch._dynamo.list_backends()


@pytest.mark.parametrize("name", ["mixer", "tcn", *(pytest.param(name, marks=pytest.mark.slow) for name in _WHOLE)])
def test_architectures(name: str) -> None:
    from tests.performance.bench_torch_compile import _inputs

    network = SMALL_ARCHITECTURES[name]
    module, inputs = network._module(), _inputs(network)
    got, eagerly = run(module, *inputs)
    check(got, module(*inputs), rtol=1e-3)
    assert not eagerly
