"""Products in the tiles of AMX, emulated where this CPU has none: their numbers, and which instructions they take."""

from __future__ import annotations

import json
import re
from math import prod

import numpy as np
import pytest
import tvm
import tvm_ffi
from harness import CORES, Case, SpaceContract, build_and_run, pytest_generate_tests
from test_cpu_bfloat import dense as dense_of_bfloats
from test_cpu_integer import _as_uint8, _blocked, _convolved, _Dense, _extreme, _requantised
from tvm import te, tirx

from cost_model.nests import read_function
from cost_model.roofline import analyse, prior
from mlc.cpu import host_cpu
from mlc.graph.kernels.integer import conv2d_nchwc_tiles, dense_integer, pack_dense
from mlc.graph.kernels.windows import filters_matrix
from mlc.target import resolve
from mlc.testing import amx
from schedules.amx_tiles import check_tiles
from schedules.cpu.gemm import GEMM_BFLOAT, GEMM_INTEGER
from schedules.cpu.gemm_tiles import GEMM_TILES, pays
from schedules.errors import InvalidDecision
from schedules.free import SIZES
from schedules.intrin.dot import BFLOATS, QUADS
from schedules.lowering import PIPELINE
from schedules.machine import cpu_machine
from schedules.registry import find
from schedules.space import first_seed, schedule_with
from schedules.trace import replay, trace_json

__all__ = ["pytest_generate_tests"]

X86 = "x86" in str(tvm.target.codegen.llvm_get_system_triple())
pytestmark = pytest.mark.skipif(not X86, reason="the kernels' instructions are x86's")
TARGET = amx.target(CORES).tvm if X86 else None
SAPPHIRE_RAPIDS = resolve("llvm -mcpu=sapphirerapids", threads=CORES).tvm


def integers(name: str, **sizes: object) -> Case:
    built = _Dense(QUADS, **sizes)  # type: ignore[arg-type]
    return Case(name, lambda: built.func, lambda *_: built.expected, data=lambda: built.arrays)


def convolution(
    name: str, image: tuple[int, int, int, int], filters: int, kernel: tuple[int, int], pads: int = 0,
    dilation: tuple[int, int] = (1, 1), strides: tuple[int, int] = (1, 1), zero: int = 0, to_uint8: bool = False,
) -> Case:
    """``[N, C, H, W]`` by ``filters``, in blocks of 16 channels, as sums or requantised."""
    rng = np.random.default_rng(filters * image[2])
    data, weight = _extreme(rng, image, "uint8"), _extreme(rng, (filters, image[1], *kernel), "int8")
    packed, blocked = pack_dense(filters_matrix(weight, 16, 16), QUADS), _blocked(data, 16)
    expected = _blocked(_convolved(data, weight, strides, (pads,) * 4, dilation, 1, zero), 16)
    scale = rng.uniform(1e-4, 1e-3, 16).astype("float32")

    def build() -> list[te.Tensor]:
        x, w = te.placeholder(blocked.shape, "uint8", name="x"), te.placeholder(packed.shape, "int8", name="w")
        sums = conv2d_nchwc_tiles(x, w, kernel, strides, (pads,) * 4, dilation, zero, 16)
        if not to_uint8:
            return [x, w, sums]
        s = te.placeholder((16,), name="scale")
        return [x, w, s, _requantised(sums, s)]

    if to_uint8:
        return Case(name, build, lambda *_: _as_uint8(expected, scale), data=lambda: [blocked, packed, scale])
    return Case(name, build, lambda *_: expected, data=lambda: [blocked, packed])


CASES = (
    convolution("pointwise", (1, 64, 8, 8), 64, (1, 1)),
    convolution("padded", (2, 64, 9, 9), 64, (3, 3), pads=1, zero=7, to_uint8=True),
    convolution("strided", (1, 128, 13, 11), 48, (1, 1), strides=(2, 2), to_uint8=True),
    convolution("dilated", (1, 32, 12, 14), 40, (3, 2), pads=1, dilation=(2, 1), zero=255),
    integers("square", m=64, n=64, k=128), integers("narrow_steps", m=48, n=48, k=96, to_uint8=True),
    integers("batch", m=32, n=32, k=64, batch=(2, 3)), integers("odd_panels", m=64, n=70, k=128, to_uint8=True),
    dense_of_bfloats(32, 48, 64, epilogue=True), dense_of_bfloats(48, 16, 48, (2,)),
)


class TestTiles(SpaceContract):
    space = GEMM_TILES
    cases = CASES

    @property
    def target(self) -> tvm.target.Target:
        return TARGET

    @pytest.fixture(autouse=True)
    def _emulated(self) -> None:
        if amx.missing():
            pytest.skip(f"{amx.missing()} must be there")
        amx.install()


def executed(tile: tuple[int, int, int], sizes: tuple[int, int, int], passing: int) -> dict[str, int]:
    """What a product of whole tiles must execute: ``sizes`` are rows, columns and steps, and weights are ``passing``
    the first cache by or not."""
    (m, n, depth), (rows, columns, steps) = tile, sizes
    tiles = rows * columns // 256
    products = tiles * steps // depth
    loads = {"tileloadd": products // n, "tileloaddt1": products // m}
    return {"tilezero": tiles, "tilestored": tiles, **(loads if passing else {"tileloadd": sum(loads.values())})}


@pytest.mark.skipif(bool(amx.missing()), reason=f"{amx.missing()} must be there")
@pytest.mark.parametrize(("form", "sizes", "tile", "passing"), [
    (QUADS, (64, 96, 48), (2, 2, 16), 0), (QUADS, (48, 32, 24), (3, 1, 12), 0), (BFLOATS, (16, 96, 32), (1, 3, 8), 0),
    (QUADS, (96, 32, 32), (3, 1, 16), 1),
])
def test_instructions_are_as_many_as_predicted(
    form: str, sizes: tuple[int, int, int], tile: tuple[int, int, int], passing: int
) -> None:
    """Executed ones are counted: a product loads one tile in the steady state of 2 x 2, none of them twice, and tiles
    are configured once in each thread."""
    if host_cpu().shows("amx-tile"):
        pytest.skip("what a CPU executes by itself is not counted")
    (rows, columns, steps), (m, n, depth) = sizes, tile
    case = integers("counted", m=rows, n=columns, k=4 * steps) if form == QUADS else dense_of_bfloats(
        rows, columns, 2 * steps)
    func, (inputs, outputs) = case.func(), case.arrays()
    taken = {"m": m, "n": n, "depth": depth, "mb": 1, "nb": 1, "k": 1, "order": 0, "inner": 0, "passing": passing}
    sch = schedule_with(GEMM_TILES, func, TARGET, taken)
    with amx.counted() as counts:
        found = build_and_run(sch.mod, [*inputs, *outputs], TARGET)[len(inputs):]
    assert case.error(inputs, found) <= case.rtol
    expected = executed(tile, sizes, passing)
    expected["tdpbusd" if form == QUADS else "tdpbf16ps"] = rows * columns * steps // 256 // depth
    threads = counts["ldtilecfg"]
    assert 1 <= threads <= CORES
    assert {k: v for k, v in counts.items() if v} == {**expected, "ldtilecfg": threads, "tilerelease": threads}


@pytest.mark.parametrize(("form", "instruction"), [(QUADS, "tdpbusd"), (BFLOATS, "tdpbf16ps")])
def test_instructions_of_a_product_for_sapphire_rapids(form: str, instruction: str) -> None:
    """The loop holds whole steps of 2 x 2 tiles, one load for each product, and keeps no tile in memory; tiles are
    configured outside of all loops."""
    case = integers("disassembled", m=256, n=256, k=1024) if form == QUADS else dense_of_bfloats(256, 256, 512)
    func = case.func()
    assert find(func, SAPPHIRE_RAPIDS) is GEMM_TILES
    sch, seed = first_seed(GEMM_TILES, func, SAPPHIRE_RAPIDS)
    assert (seed["m"], seed["n"], seed["depth"]) == (2, 2, 16)
    assert seed["passing"], "rows and columns of 1024 bytes do not lie in the first cache together"
    assembly = str(tvm.compile(sch.mod, SAPPHIRE_RAPIDS, tir_pipeline=PIPELINE).mod.inspect_source("s"))
    assert len(re.findall(r"\sldtilecfg\s", assembly)) == len(re.findall(r"\stilerelease\s", assembly)) == 1
    hot = max(re.split(r"\n(?=\.L\w+:)", assembly), key=lambda block: block.count(instruction))
    (loop,) = re.findall(rf"tdp(?:.|\n)*{instruction}", hot)
    steps = re.findall(rf"\s({instruction}|tileloadd|tileloaddt1|tilestored|ldtilecfg)\s", hot)
    assert steps.count(instruction) % (4 * seed["k"]) == 0
    assert steps.count("tileloadd") == steps.count("tileloaddt1") == steps.count(instruction) / 2
    assert "ldtilecfg" not in steps
    assert not re.search(r"tile\w+ .*\(%[er]sp", assembly), "no tile lies on the stack"
    assert not re.search(r"%[xyz]mm", loop)


def test_few_rows_and_machines_without_tiles_take_dot_products() -> None:
    of_bytes, of_floats = _Dense(QUADS, m=16, n=128, k=256).func, dense_of_bfloats(16, 128, 256).func()
    for name, spaces in {"llvm -mcpu=sapphirerapids": (GEMM_TILES, GEMM_TILES),
                         "llvm -mcpu=graniterapids": (GEMM_TILES, GEMM_TILES),
                         "llvm -mcpu=sapphirerapids -mattr=-amx-bf16": (GEMM_TILES, GEMM_BFLOAT),
                         "llvm -mcpu=sapphirerapids -mattr=-amx-tile": (GEMM_INTEGER, GEMM_BFLOAT),
                         "llvm -mcpu=znver4": (GEMM_INTEGER, GEMM_BFLOAT)}.items():
        on = resolve(name, threads=CORES).tvm
        assert (find(of_bytes, on), find(of_floats, on)) == spaces, name
    assert find(_Dense(QUADS, m=17, n=128, k=256).func, SAPPHIRE_RAPIDS) is GEMM_INTEGER
    rows = [m for m in range(1, 64) if pays(m, 768, 192, QUADS, SAPPHIRE_RAPIDS)]
    assert rows == list(range(rows[0], 64))
    assert 2 <= rows[0] <= 8
    assert not pays(64, 768, 191, QUADS, SAPPHIRE_RAPIDS), "no tile has steps of which 191 is made"


def test_what_is_known_of_a_sapphire_rapids() -> None:
    """Intel's optimisation manual: a product of tiles every 16 cycles, of 16 x 16 x 64 bytes."""
    machine = cpu_machine(SAPPHIRE_RAPIDS)
    assert machine.tile_macs_per_cycle("int8") == 16 * 16 * 64 / 16 == 8 * machine.macs_per_cycle("int8")
    assert machine.tile_macs_per_cycle("bfloat16") == 512
    assert (machine.l1_bytes, machine.l2_bytes) == (48 << 10, 2 << 20)
    assert cpu_machine(resolve("llvm -mcpu=znver4").tvm).tile_macs_per_cycle("int8") == 0


def test_free_sizes_take_dot_products() -> None:
    rows = tirx.Var("rows", "int64")
    x, w = te.placeholder((rows, 128), "uint8", name="x"), te.placeholder((4, 32, 16, 4), "int8", name="w")
    func = te.create_prim_func([x, w, dense_integer(x, w)]).with_attr(SIZES, [[1, 128, 64]])
    assert find(func, SAPPHIRE_RAPIDS) is GEMM_INTEGER


# -- traces that would not compute what they say


def _trace() -> tuple[tirx.PrimFunc, list]:
    func = _Dense(QUADS, m=64, n=64, k=128).func
    return func, json.loads(trace_json(first_seed(GEMM_TILES, func, SAPPHIRE_RAPIDS)[0]))


def _edited(old: str, new: str) -> tuple[tirx.PrimFunc, str]:
    func, trace = _trace()
    text = json.dumps(trace)
    assert old in text
    return func, text.replace(old, new)


def test_a_trace_is_replayed_as_it_is() -> None:
    func, trace = _trace()
    replay(func, json.dumps(trace), SAPPHIRE_RAPIDS)


@pytest.mark.parametrize("kind", ["Annotate", "zero", "store", "tiles_quads"])
def test_a_trace_that_leaves_out_a_step_of_tiles_is_refused(kind: str) -> None:
    """Without the mark nothing is configured, without one of the instructions the sums are nowhere."""
    func, (steps, decisions) = _trace()
    kept = [step for step in steps if not (
        (step[0] == "Annotate" and kind == "Annotate" and step[2] == ["mlc.tiles"])
        or (step[0] == "Tensorize" and kind in step[2][0]))]
    assert len(kept) == len(steps) - 1
    index = {old: new for new, old in enumerate(i for i, step in enumerate(steps) if step in kept)}
    with pytest.raises(InvalidDecision, match=r"tiles|summed"):
        replay(func, json.dumps([kept, [[index[i], decision] for i, decision in decisions]]), SAPPHIRE_RAPIDS)


@pytest.mark.parametrize(("old", "new"), [
    ('[2, 2, 16]', '[2, 2, 12]'), ('[2, 2, 16]', '[1, 2, 16]'), ('[2, 2, 16]', '[2, 2, 17]'), ('[2, 2, 16]', '"2x2"'),
])
def test_a_trace_with_other_shapes_of_tiles_is_refused(old: str, new: str) -> None:
    func, text = _edited(old, new)
    with pytest.raises(InvalidDecision):
        replay(func, text, SAPPHIRE_RAPIDS)


@pytest.mark.parametrize("change", ["mark twice", "vectorise", "pipeline", "parallel inside"])
def test_loops_around_tiles_run_as_they_stand(change: str) -> None:
    """Each of these would clear sums half-way, mix up tiles, or leave a thread without a configuration."""
    func = _Dense(QUADS, m=128, n=128, k=512).func
    taken = {"m": 2, "n": 2, "depth": 16, "mb": 2, "nb": 2, "k": 1, "order": 0, "inner": 0, "passing": 0}
    sch = schedule_with(GEMM_TILES, func, SAPPHIRE_RAPIDS, taken)
    check_tiles(sch.mod["main"])
    (product,) = (block for block in sch.get_child_blocks(sch.get_loops(sch.get_sblock("dense_integer_o_init"))[-1])
                  if sch.get(block).name_hint == "dense_integer_o_update")
    chunk, outer, inner, step, _ = sch.get_loops(product)
    if change == "mark twice":
        sch.annotate(step, "mlc.tiles", [2, 2, 16])
    elif change == "pipeline":
        sch.annotate(inner, "software_pipeline_stage", [0, 0, 1])
    func = sch.mod["main"]
    if change in ("vectorise", "parallel inside"):  # which TVM's primitives would not do
        kind = tirx.ForKind.VECTORIZED if change == "vectorise" else tirx.ForKind.PARALLEL
        variable = sch.get(outer).loop_var

        def turned(loop: tirx.For) -> tirx.For:
            if not loop.loop_var.same_as(variable):
                return loop
            return tirx.For(loop.loop_var, loop.min, loop.extent, kind, loop.body, annotations=loop.annotations)

        func = func.with_body(tvm_ffi.structural_map(func.body, (tirx.For, turned)))
    assert sch.get(chunk).kind == tirx.ForKind.PARALLEL
    with pytest.raises(InvalidDecision, match=r"loop"):
        check_tiles(func)


def test_machines_without_tiles_refuse_the_trace() -> None:
    func, trace = _trace()
    with pytest.raises(InvalidDecision, match="amx"):
        replay(func, json.dumps(trace), resolve("llvm -mcpu=znver4").tvm)


def test_exact_at_the_ends_of_all_ranges() -> None:
    """Sums that wrap where any instruction's would."""
    if amx.missing():
        pytest.skip(f"{amx.missing()} must be there")
    amx.install()
    case = integers("ends", m=32, n=32, k=64)
    func, (inputs, outputs) = case.func(), case.arrays()
    sch = first_seed(GEMM_TILES, func, TARGET)[0]
    for activation, weight in ((255, -128), (255, 127), (0, -128)):
        arrays = [np.full_like(inputs[0], activation), np.full_like(inputs[1], weight), *outputs]
        (found,) = build_and_run(sch.mod, arrays, TARGET)[2:]
        assert (found == activation * weight * 64).all()
        assert prod(found.shape) == 32 * 32


def test_estimates_know_what_tiles_do() -> None:
    """All products are seen, and single tiles, which wait for their sums, are slower than groups of four."""
    func = _Dense(QUADS, m=128, n=256, k=512).func
    seconds = {}
    for m, n in ((2, 2), (1, 1)):
        taken = {"m": m, "n": n, "depth": 16, "mb": 1, "nb": 1, "k": 1, "order": 0, "inner": 0, "passing": 0}
        mod = schedule_with(GEMM_TILES, func, SAPPHIRE_RAPIDS, taken).mod
        (nest,) = (nest for nest in read_function(mod).nests if nest.tiles)
        assert nest.iterations == 128 * 256 * 512 / 4
        seconds[m, n] = prior(mod, SAPPHIRE_RAPIDS)
    assert analyse(func, SAPPHIRE_RAPIDS).compute_seconds <= seconds[2, 2] < 0.6 * seconds[1, 1]
    dots = prior(first_seed(GEMM_INTEGER, func, SAPPHIRE_RAPIDS)[0].mod, SAPPHIRE_RAPIDS)
    assert dots > 3 * seconds[2, 2]


def test_what_reads_a_product_in_another_order_takes_dot_products() -> None:
    """A transposed result is no row of tiles."""
    x, w = te.placeholder((64, 128), "uint8", name="x"), te.placeholder((4, 32, 16, 4), "int8", name="w")
    sums = dense_integer(x, w)
    turned = te.compute((64, 64), lambda i, j: sums[j, i] + 1, name="turned")
    assert find(te.create_prim_func([x, w, sums]), SAPPHIRE_RAPIDS) is GEMM_TILES
    assert not GEMM_TILES.matches(te.create_prim_func([x, w, turned]), SAPPHIRE_RAPIDS)
