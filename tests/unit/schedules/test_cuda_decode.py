"""Attention of a few queries over many keys, as decoders ask for: keys are cut over blocks, the last one joins."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import tvm
from harness import check_orders, emulate, emulated_error, refusal
from test_cuda_attention import AMPERE, HOPPER, SPACES, check_promises, compiled, scheduled
from test_cuda_joined import STEPS

from mlc.testing import cuda_emulator
from mlc.testing.cases import Case
from mlc.testing.cuda_attention import TOLERANCES, attention_case
from schedules.cuda.attention import expanded
from schedules.cuda.heads import grouped, heads_of
from schedules.machine import gpu_machine
from schedules.space import InvalidDecision, first_seed, schedule_with
from schedules.trace import trace_json

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator is compiled with g++")


def split(splits: int, warps: int = 1, keys: int = 16, stages: int = 2) -> dict[str, int]:
    return {"warps": warps, "keys": keys, "stages": stages, "splits": splits}


def grid(func: tvm.tirx.PrimFunc) -> int:
    (launch,) = cuda_emulator.launches(func)
    return launch.grid[0]


@needs_nvcc
@pytest.mark.sampled(12)
@pytest.mark.parametrize("dtype", SPACES)
@pytest.mark.parametrize("groups,depth", [(4, 128), (1, 64), (8, 128)])
def test_a_seed_keeps_the_gpu_busy_and_spills_nothing(groups: int, depth: int, dtype: str) -> None:
    """Heads that share keys are rows, as the importer of grouped attention writes them."""
    func = attention_case("decode", (1, 8), (groups, 4096, depth, depth), dtype).func()
    for target in (AMPERE, HOPPER):
        sch, decisions = first_seed(SPACES[dtype], func, target)
        blocks = grid(sch.mod["main"])
        assert decisions["splits"] > 1 and blocks == 8 * decisions["splits"]
        assert blocks >= 0.9 * gpu_machine(target).multiprocessors
        kernel = compiled(sch.mod["main"], target)
        if kernel.instructions:
            assert kernel.count("STG.E.128") and kernel.count("LDG.E.128"), "parts are written and read in 16 bytes"
            assert kernel.count("MEMBAR") and kernel.count("ATOMG")
            kernel.instructions.pop("LDG.E.128"), kernel.instructions.pop("LDG.E")  # of parts, the maxima and totals
        check_promises(kernel, dtype)


def test_keys_are_cut_where_queries_are_too_few_alone() -> None:
    """Nor is a decision asked for, and traces of other functions stay what they are."""
    def names(heads: int, queries: int, keys: int) -> list[str]:
        func = attention_case("any", (1, heads), (queries, keys, 64, 64)).func()
        return [knob.name for knob in SPACES["float16"].knobs(func, AMPERE)]

    assert "splits" in names(8, 4, 512) and "splits" in names(1, 128, 4096)
    assert "splits" not in names(16, 1024, 1024) and "splits" not in names(8, 4, 32)
    case = attention_case("few", (1, 2), (4, 128, 64, 64))
    with pytest.raises(InvalidDecision, match="knob splits must be one of"):
        scheduled(case, "float16", split(128))


#: heads, queries, keys, depth and features, causal limit
ODD = [((1, 1), 1, 4096, 64, 64, None), ((1, 2), 8, 333, 50, 18, None), ((2, 3), 3, 333, 64, 64, 330),
       ((1, 8), 1, 77, 128, 128, None), ((1, 4), 5, 1000, 32, 40, None), ((3, 1), 17, 200, 72, 24, 183)]


@needs_gxx
@pytest.mark.slow
@pytest.mark.parametrize("dtype", SPACES)
@pytest.mark.parametrize("shape", ODD, ids=str)
def test_odd_shapes_and_lengths_are_exact_enough(
    dtype: str, shape: tuple[tuple[int, int], int, int, int, int, int | None]
) -> None:
    """Of the first seed's tiles and as many splits as there may be, with a mask that hides all keys behind a length
    where there is no causal limit."""
    heads, queries, keys, depth, features, causal = shape
    sizes = (queries, keys, depth, features)
    case = attention_case(f"{shape}", heads, sizes, dtype, causal=causal, mask=causal is None)
    *_, splits = SPACES[dtype].knobs(case.func(), HOPPER)
    decisions = first_seed(SPACES[dtype], case.func(), HOPPER)[1] | {splits.name: splits.values[-1]}
    func = scheduled(case, dtype, decisions, HOPPER)
    assert splits.name == "splits" and grid(func) >= heads[0] * heads[1] * 2
    inputs, outputs = case.arrays()
    for batch, mask in enumerate(inputs[-1] if causal is None else ()):
        mask[..., 1 + keys // (batch + 3):] = -np.inf
    cuda_emulator.run(func, HOPPER, inputs, outputs)
    assert case.error(inputs, outputs) <= TOLERANCES[dtype]


def test_heads_that_share_keys_are_rows_of_one() -> None:
    """As far as their queries fill one tile, and each query's limit is the same."""
    def shape(heads: int, groups: int, queries: int, causal: int | None = None) -> tuple[int, int]:
        sizes = (queries, 64, 32, 32)
        found = heads_of(attention_case("any", (2, heads), sizes, groups=groups, causal=causal).func())
        assert found is not None
        taken = grouped(found)
        return taken.count, taken.queries

    assert shape(8, 4, 1) == (4, 4) and shape(8, 8, 2) == (2, 16) and shape(6, 3, 5) == (4, 15)
    assert shape(8, 1, 1) == (16, 1) and shape(8, 4, 5) == (8, 10), "two of the four heads that share fill a tile"
    assert shape(8, 4, 100) == (16, 100) and shape(8, 4, 2, causal=62) == (16, 2)


@needs_gxx
@pytest.mark.sampled(12)
@pytest.mark.parametrize("dtype", SPACES)
@pytest.mark.parametrize("heads,groups,queries,keys,mask", [
    (8, 4, 1, 333, True), (6, 3, 2, 77, False), (8, 8, 1, 64, True)], ids=str)
def test_shared_keys_are_brought_once(
    dtype: str, heads: int, groups: int, queries: int, keys: int, mask: bool
) -> None:
    brought = {}
    for number, shared in ((heads // groups, 1), (heads, groups)):  # as many heads of keys
        case = attention_case("shared", (2, number), (queries, keys, 32, 32), dtype, groups=shared, mask=mask)
        func = scheduled(case, dtype, split(2))
        error, costs = emulate(case, func)
        assert error <= case.rtol
        assert grid(func) == 2 * number // shared * 2
        brought[shared] = sum(cost.requests for cost in costs if cost.what.startswith("cp.async") and cost.bytes == 16)
    assert brought[groups] <= brought[1], "queries of several heads may come one number at a time"


def decode(dtype: str = "float16", mask: bool = False) -> tuple[Case, tvm.tirx.PrimFunc]:
    """Three queries over seven tiles of keys in two splits."""
    case = attention_case("split", (1, 2), (3, 107, 40, 24), dtype, mask=mask)
    return case, scheduled(case, dtype, split(2))


@needs_gxx
@pytest.mark.parametrize("dtype", ["float16", pytest.param("float32", marks=pytest.mark.slow)])
def test_the_last_block_joins_whichever_it_is(dtype: str) -> None:
    """Two runs, the second with the blocks in the opposite order: both right, and the same to the last bit."""
    case, func = decode(dtype)
    found = []
    for repeats in (1, 2):
        inputs, outputs = case.arrays()
        cuda_emulator.run(func, AMPERE, inputs, outputs, repeats)
        assert case.error(inputs, outputs) <= case.rtol
        found.append(outputs[0])
    assert np.array_equal(found[0], found[1])


@needs_gxx
@pytest.mark.slow
def test_keys_that_a_mask_hides_count_nothing_and_no_keys_are_no_number() -> None:
    """Whole splits may be hidden, and from the first of two queries' heads everything."""
    case, func = decode(mask=True)
    for seen in (slice(100, 107), slice(0, 5), slice(0, 0)):
        inputs, outputs = case.arrays()
        hidden = np.full_like(inputs[-1], -np.inf)
        hidden[..., seen] = 0.0
        inputs[-1][...] = hidden
        cuda_emulator.run(func, AMPERE, inputs, outputs)
        if seen.stop:
            assert case.error(inputs, outputs) <= case.rtol
        else:
            assert np.isnan(outputs[0].astype("float32")).all()


@needs_gxx
@pytest.mark.slow
def test_each_wait_barrier_and_fence_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = attention_case("split", (1, 1), (64, 96, 32, 16))
    func = scheduled(case, "float16", split(2, 4))
    assert check_orders(monkeypatch, case, func) >= 4
    source = cuda_emulator.cuda_source(func, AMPERE)
    steps = {name: each for name, each in STEPS.items() if "4u" not in each[0]}
    for place, (name, (there, switched)) in enumerate(steps.items()):
        assert source.count(there) == 1, name
        source = source.replace(there, switched.replace("OUT", f"LEFT_OUT({place})"))
    assert emulated_error(monkeypatch, case, func, source, 2) <= case.rtol
    for place, name in enumerate(steps):
        assert emulated_error(monkeypatch, case, func, source, 2, left_out=place) > 10 * case.rtol, name


def test_parts_are_all_that_blocks_hand_over() -> None:
    _, func = decode()
    body = expanded(func).body
    *handed, kernel = body.seq
    sizes = {str(step.buffer.name): int(step.buffer.shape[0]) for step in handed}
    assert sizes == {"parts": 2 * 2 * 16 * 32, "tops": 2 * 2 * 2 * 16}, "two splits, two heads, 16 queries"
    assert {buffer.scope() for buffer in kernel.block.alloc_buffers} == {"local", "shared.dyn"}


def test_a_trace_may_not_cut_keys_otherwise() -> None:
    func = attention_case("split", (1, 2), (3, 107, 40, 24)).func()
    trace = trace_json(schedule_with(SPACES["float16"], func, AMPERE, split(2)))
    assert not refusal(func, trace, AMPERE)
    instructions, decisions = json.loads(trace)
    (mark,) = [step for step in instructions if step[0] == "Annotate"]
    for wrong in ([1, 16, 2, 1], [1, 16, 2, 0], [1, 16, 2, 129], [1, 16, 2, 2, 2], [1, 16, 2, "2"]):
        mark[1][1] = wrong
        assert "a value as search spaces give it" in refusal(func, json.dumps([instructions, decisions]), AMPERE)

