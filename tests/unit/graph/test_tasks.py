"""What a task knows of its place in the model."""

from __future__ import annotations

from relax_evaluation import module, weight
from tvm import relax
from tvm.script import relax as R

from mlc.graph.pipeline import optimise
from mlc.graph.tasks import extract_tasks
from mlc.target import resolve

GPU = resolve("cuda:sm_80")  # no blocked layouts, no packed weights


def _tasks(func: relax.Function) -> dict[str, tuple[int, tuple[int, ...], int]]:
    found = extract_tasks(optimise(module(func), GPU), GPU)
    return {task.name: (task.weight, task.constants, task.constant_bytes) for task in found}


def test_constants_are_the_weights_of_every_call_and_all_weights_count_once() -> None:
    w, v, b = weight(8, 8), weight(8, 8), weight(8)

    @R.function(private=True)
    def func(x: R.Tensor((8, 8), "float32")):
        with R.dataflow():
            a = R.nn.softmax(R.matmul(x, w))
            c = R.nn.softmax(R.matmul(a, v))
            d = R.nn.softmax(R.add(R.matmul(c, w), b))
            y = R.exp(R.matmul(d, d))
            R.output(y)
        return y

    size = 4 * (64 + 64 + 8)
    found = _tasks(func)
    assert found["matmul"] == (2, (1,), size)
    assert found["fused_matmul_add"] == (1, (1, 2), size)
    assert found["softmax"] == (3, (), size)
    assert found["fused_matmul_tir_exp"] == (1, (), size)


def test_a_weight_in_one_call_and_an_activation_in_another_is_no_constant() -> None:
    w = weight(8, 8)

    @R.function(private=True)
    def func(x: R.Tensor((8, 8), "float32")):
        with R.dataflow():
            a = R.nn.softmax(R.matmul(x, w))
            y = R.nn.softmax(R.matmul(x, a))
            R.output(y)
        return y

    assert _tasks(func)["matmul"] == (2, (), 4 * 64)
