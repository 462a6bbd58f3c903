"""Artifacts for GPUs under TVM's own runtime, on a GPU that is this machine's CPU: memory, graphs, tensors."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator is compiled with g++")
PROGRAMS = ("dense", "results", "scalars", "constant", "twins", "long_sum")


def found(folder: Path, *asked: str) -> dict[str, Any]:
    script = Path(__file__).with_name("on_emulated_gpu.py")
    command = [sys.executable, str(script), str(folder), *asked]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return found(tmp_path_factory.mktemp("gpu"))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_model_is_one_graph(facts: dict[str, Any], name: str) -> None:
    """Its kernels are started one by one in the first call, as CUDA asks for, and by a graph in each later one."""
    first, *later = facts[name]["calls"]
    assert all(call["error"] <= 1e-5 for call in (first, *later)) and first["later"] <= 1e-5
    assert first["started"] >= facts[name]["functions"] > 0 == first["graphs"]
    for call in later:
        assert (call["started"], call["graphs"], call["replayed"]) == (0, 1, first["started"])


def test_nothing_but_inputs_and_outputs_is_copied(facts: dict[str, Any]) -> None:
    assert facts["dense"]["calls"][1]["copies"] == 2
    assert facts["scalars"]["calls"][1]["copies"] == 4 + 3
    assert facts["results"]["calls"][1]["copies"] == 1 + 5


def test_copies_need_not_wait_for_this_machine(facts: dict[str, Any]) -> None:
    """All of them, of arrays in and out, are of page-locked memory; a copy of other memory blocks the host."""
    for name in PROGRAMS:
        assert [call["pageable"] for call in facts[name]["calls"][1:]] == [0, 0], name
    assert facts["device"]["host_pageable"] == 0


def given_to(stream: int) -> list[list[Any]]:
    """What a call of a graph with one input and one output is: nothing of it is elsewhere."""
    return [["copy", stream], ["graph", stream], ["copy", stream]]


def test_a_call_runs_on_the_stream_that_is_named(facts: dict[str, Any]) -> None:
    """It returns at once where all is on the GPU: results are there when the stream has come to its end."""
    streams = facts["streams"]
    assert streams["named"] == [*given_to(71), ["record", 71]] and streams["asked_of_producer"] == [71]
    assert streams["before_it_is_awaited"] > 1e30 and max(streams["after"]) <= 1e-5


def test_only_another_stream_waits_for_an_event(facts: dict[str, Any]) -> None:
    first, second = ([["wait", stream], *given_to(stream), ["record", stream]] for stream in (72, 73))
    again, last = [*given_to(73), ["record", 73]], [["wait", 74], *given_to(74), ["record", 74]]
    assert facts["streams"]["several"] == [*first, *second, *again, *last]


def test_a_missing_event_would_show(facts: dict[str, Any]) -> None:
    """Else what the emulated GPU says of streams is worth nothing."""
    assert max(facts["without_the_event"]) > 0.1


def test_the_callers_current_stream_is_one(facts: dict[str, Any]) -> None:
    """Of ``tvm_ffi``, then of PyTorch. Arrays of this machine's, which a copy on that stream may still write to, are
    read behind it."""
    streams = facts["streams"]
    assert streams["current"] == [["wait", 75], *given_to(75), ["synchronise", 75]]
    assert streams["current_of_arrays"] == [["synchronise", 75], *given_to(75), ["synchronise", 75]]
    assert streams["torch"] == [*given_to(79), ["record", 79]]
    assert max(streams["results_here"], streams["arrays_here"]) <= 1e-5


def test_what_nobody_names_a_stream_for_is_awaited(facts: dict[str, Any]) -> None:
    streams = facts["streams"]
    assert streams["default"][:4] == [*given_to(0), ["synchronise", 0]] and streams["nobody_names_one"] <= 1e-5


def test_page_locked_memory_is_written_to_behind_the_call_before(facts: dict[str, Any]) -> None:
    call = facts["streams"]["into_this_machine"][4:]
    assert call == [["wait", 77], ["await", 76], ["synchronise", 77], *given_to(77), ["synchronise", 77]]
    assert facts["streams"]["mixed"] <= 1e-5


def test_kernels_that_are_no_graph_stay_on_the_default_stream(facts: dict[str, Any]) -> None:
    """Their memory is handed out in the order of calls. Two events put them between what else the stream does."""
    done = [tuple(each) for each in facts["streams"]["no_graph"]]
    assert {stream for what, stream in done if what == "kernel"} == {0}
    assert done.index(("record", 78)) < done.index(("wait", 0)) < done.index(("kernel", 0)) < done.index(("wait", 78))
    assert ("synchronise", 0) in done, "each kernel is awaited where it runs"


def test_what_is_no_stream_is_refused_in_one_line(facts: dict[str, Any]) -> None:
    for reason, given in zip(facts["streams"]["refused"], ("'a'", "-1", "True"), strict=True):
        assert reason == ("a stream must be the number of a cudaStream_t, or have __cuda_stream__ as PyTorch's and "
                          f"CuPy's do, got {given}; take torch.cuda.current_stream(), or leave it out")


def test_tensors_on_the_gpu(facts: dict[str, Any]) -> None:
    """They are read and written there; their producer is told of the default stream, which DLPack calls 1."""
    device = facts["device"]
    assert max(device["error"], device["host"]) <= 1e-5
    assert (device["graphs"], device["started"], device["copies"]) == (1, 0, 2)
    assert device["streams"] == [1]
    shape, apart = device["refused"]
    assert shape == "input x must have shape [5, 24], got [24, 5]; reshape it"
    assert "output bias_relu" in apart or "must have memory of its own" in apart


def test_each_kernel_can_still_be_watched(facts: dict[str, Any]) -> None:
    assert facts["device"]["profiled"]


def test_a_gpu_without_memory_is_named_in_one_line(facts: dict[str, Any]) -> None:
    weight, given, between = facts["without_memory"]
    assert weight.startswith("a tensor of float32 and shape [1024, 24] must fit the GPU's memory, but CUDA refused it")
    assert given.startswith("a tensor of float32 and shape [6, 1024] must fit") and "out of memory" in given
    assert re.fullmatch(r"what lies between the kernels of \w+ must fit the GPU's memory, but CUDA refused it "
                        r"\(.*out of memory\); end what else uses the GPU, or make the batch smaller", between), between
    assert "\n" not in weight + given


@pytest.mark.slow
def test_a_transformer_is_one_graph_and_right(tmp_path: Path) -> None:
    """Exact and on tensor cores, against onnxruntime."""
    for precision, run in found(tmp_path, "transformer").items():
        assert run["error"] <= (1e-4 if precision == "f32" else 2e-2), precision
        assert (run["started"], run["graphs"]) == (0, 1) and run["replayed"] > 10
        exact = precision == "f32"
        assert {*run["spaces"]} >= ({"cuda.attention_f32", "cuda.gemm"} if exact else {"cuda.attention", "cuda.mma"})


@pytest.mark.slow
def test_a_decoders_keys_are_cut_over_blocks(tmp_path: Path) -> None:
    """In kernels that hand parts over in memory of the host's, and count them, from one call to the next."""
    for precision, run in found(tmp_path, "decoder").items():
        assert run["error"] <= (1e-4 if precision == "f32" else 2e-2), precision
        assert (run["started"], run["graphs"]) == (0, 1) and run["replayed"] > 10
        assert run["splits"] and min(run["splits"]) > 1


def test_one_artifact_serves_all_sizes(tmp_path: Path) -> None:
    """Of a number of texts and of their lengths, and of what a decoder remembers, which is nothing at first."""
    facts = found(tmp_path, "free_sizes")
    texts, tokens = facts["texts"], facts["tokens"]
    assert max(*texts["errors"], *tokens["errors"]) <= 1e-2, "of products of 16 bits, beside float32"
    assert {"cuda.attention", "cuda.mma"} <= {*texts["spaces"]} and "cuda.attention" in tokens["spaces"]
    assert texts["refused"].startswith("input input_ids must have a shape in [1..6,1..80], got [7, 1]")


def test_a_generator_keeps_its_state_on_the_gpu(tmp_path: Path) -> None:
    """Tokens by themselves, in groups, or all at once have the same logits; memory of this machine would be copied, and
    what is appended to it lost."""
    facts = found(tmp_path, "generator")
    assert max(facts["errors"]) <= 1e-5 < facts["in_float16"] <= 5e-3
    assert "must be memory of the GPU" in facts["refused"] and "\n" not in facts["refused"]
