"""Register-tiled products and convolutions: seeds and random decisions against float64 references."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import numpy as np
import pytest
import tvm
from contractions import NATIVE, TARGETS, check, random
from harness import Case, SpaceContract, pytest_generate_tests
from tvm import s_tir, te, tirx

from mlc.graph.kernels.blocked import conv2d_nchwc, dense_packed
from mlc.graph.kernels.transposed import axes, conv2d_transpose_nchwc, phase_weight
from mlc.target import resolve
from schedules.cpu.conv import CONV2D
from schedules.cpu.gemm import GEMM
from schedules.cpu.winograd import WINOGRAD
from schedules.lowering import PIPELINE
from schedules.machine import cpu_machine
from schedules.space import Decisions, InvalidDecision, Space, schedule_with

__all__ = ["pytest_generate_tests"]

RNG = np.random.default_rng(3)


GEMMS = {
    "packed": ("packed", 1, 24, 48, 40),
    "packed vector": ("packed", 1, 1, 64, 33),
    "ragged rows": ("packed", 1, 37, 32, 20),
    "batched": ("plain", 3, 16, 24, 12),
    "batched, odd depth": ("plain", 2, 10, 8, 7),
    "long sum of few elements": ("packed", 1, 4, 64, 1024),
    "long sum of one row": ("packed", 1, 1, 16, 480),
    "long sums, batched": ("plain", 2, 3, 8, 768),
    "sum beyond the cache": ("packed", 1, 32, 64, 6144),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", GEMMS)
def test_gemm_with_epilogue(name: str) -> None:
    kind, batch, m, n, k = GEMMS[name]
    a = te.placeholder((batch, m, k), name="a")
    if kind == "packed":
        b = te.placeholder((n // 16, k, 16), name="b")
        c = dense_packed(a, b)
    else:
        b = te.placeholder((batch, k, n), name="b")
        r = te.reduce_axis((0, k), name="r")
        c = te.compute((batch, m, n), lambda x, i, j: te.sum(a[x, i, r] * b[x, r, j], axis=[r]), name="c")
    bias, residual = te.placeholder((n,), name="bias"), te.placeholder((batch, m, n), name="residual")
    d = te.compute(c.shape, lambda x, i, j: c[x, i, j] + bias[j], name="d")
    # the result of the product is read twice, as in a gated activation
    zero = tirx.const(0, "float32")
    e = te.compute(c.shape, lambda x, i, j: tirx.max(d[x, i, j], zero) + d[x, i, j] * residual[x, i, j], name="e")
    arrays = [random(RNG, t) for t in (a, b, bias, residual)]
    left, right = arrays[0].astype("float64"), arrays[1].astype("float64")
    if kind == "packed":
        right = right.transpose(1, 0, 2).reshape(k, n)
    product = left @ right + arrays[2]
    expected = np.maximum(product, 0) + product * arrays[3]
    check(GEMM, te.create_prim_func([a, b, bias, residual, e]), arrays, expected, RNG)


PLAIN = {
    # transposed operands, batch, m, n, k
    "first transposed": ("A", 2, 20, 32, 24),
    "second transposed": ("B", 1, 24, 48, 20),
    "both transposed": ("AB", 2, 16, 32, 12),
    "prime sizes": ("", 1, 31, 53, 13),
    "prime sizes, second transposed": ("B", 3, 13, 29, 17),
    "few columns": ("", 1, 19, 5, 11),
    "packed for its stride": ("", 1, 260, 1024, 520),
    "long sum, padded columns": ("", 1, 9, 20, 768),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PLAIN)
def test_product_of_two_activations(name: str) -> None:
    transposed, batch, m, n, k = PLAIN[name]
    a = te.placeholder((batch, k, m) if "A" in transposed else (batch, m, k), name="a")
    b = te.placeholder((batch, n, k) if "B" in transposed else (batch, k, n), name="b")
    r = te.reduce_axis((0, k), name="r")

    def product(x, i, j):  # type: ignore[no-untyped-def]
        row = a[x, r, i] if "A" in transposed else a[x, i, r]
        return te.sum(row * (b[x, j, r] if "B" in transposed else b[x, r, j]), axis=[r])

    c = te.compute((batch, m, n), product, name="c")
    bias = te.placeholder((n,), name="bias")
    d = te.compute(c.shape, lambda x, i, j: tirx.max(c[x, i, j] + bias[j], tirx.const(0, "float32")), name="d")
    arrays = [random(RNG, t) for t in (a, b, bias)]
    left, right = (array.astype("float64") for array in arrays[:2])
    left = left.swapaxes(1, 2) if "A" in transposed else left
    right = right.swapaxes(1, 2) if "B" in transposed else right
    check(GEMM, te.create_prim_func([a, b, bias, d]), arrays, np.maximum(left @ right + arrays[2], 0), RNG)


def test_products_that_a_copy_would_not_pay_for_are_left_to_others() -> None:
    r = te.reduce_axis((0, 64), name="r")
    x, w = te.placeholder((1, 64), name="x"), te.placeholder((100, 64), name="w")
    rows = te.compute((1, 100), lambda i, j: te.sum(x[i, r] * w[j, r], axis=[r]))
    gram = te.compute((100, 100), lambda i, j: te.sum(w[i, r] * w[j, r], axis=[r]))
    for func in (te.create_prim_func([x, w, rows]), te.create_prim_func([w, gram])):
        assert not GEMM.matches(func, NATIVE)


def _first_seed(m: int, k: int, n: int, level: str = "x86-64-v4") -> tuple[Decisions, list[str]]:
    """The first seed of ``[m, k] x [k, n]`` for an x86 level, and the names of the knobs."""
    a, b = te.placeholder((m, k), name="a"), te.placeholder((n // 16, k, 16), name="b")
    func, target = te.create_prim_func([a, b, dense_packed(a, b)]), resolve(level, threads=2).tvm
    return next(GEMM.seeds(func, target)), [knob.name for knob in GEMM.knobs(func, target)]


def test_a_long_sum_of_few_elements_is_cut() -> None:
    seed, _ = _first_seed(4, 4096, 64)
    assert seed["parts"] >= 2, "one register tile would leave a core idle"
    seed, _ = _first_seed(1, 4096, 16)
    assert seed["chains"] >= 2 and seed["parts"] == 1, "one accumulator waits for itself; two threads cost more"
    seed, _ = _first_seed(1024, 8192, 1024)
    assert 128 <= 8192 // seed["kb"] <= 1024, "panels of the whole sum overflow the second cache"
    assert not {"parts", "chains", "kb"} & set(_first_seed(512, 512, 512)[1])


@pytest.mark.parametrize("level", ["x86-64-v3", "x86-64-v4"])
@pytest.mark.parametrize("m, k, n", [
    (128, 768, 3072), (128, 2048, 512), (500, 1536, 384), (16, 768, 3072), (17, 3072, 768), (32, 768, 768),
])
def test_weights_beyond_the_second_cache_are_fetched_a_column_ahead(m: int, k: int, n: int, level: str) -> None:
    seed, _ = _first_seed(m, k, n, level)
    assert seed["prefetch"] and (seed["inner"] or seed["nb"] == 1), "rows innermost: what comes next is known"
    assert not _first_seed(m, 64, 128, level)[0]["prefetch"], "it waits in the cache"


def test_a_loop_over_a_sum_holds_several_steps_where_four_leave_a_rest() -> None:
    assert [_first_seed(32, k, 512)[0]["k"] for k in (512, 415, 50, 18, 13)] == [4, 5, 5, 6, 1]


def test_parts_of_a_sum_that_have_no_common_length_are_refused() -> None:
    a, b = te.placeholder((4, 1000), name="a"), te.placeholder((4, 1000, 16), name="b")
    func, target = te.create_prim_func([a, b, dense_packed(a, b)]), resolve("x86-64-v4", threads=2).tvm
    seed = next(GEMM.seeds(func, target))
    with pytest.raises(InvalidDecision, match="knob parts must be one of"):
        schedule_with(GEMM, func, target, {**seed, "parts": 3})
    with pytest.raises(InvalidDecision, match="the parts of a sum of 1000 must have one length"):
        schedule_with(GEMM, func, target, {**seed, "parts": 4, "k": 8})


def test_gemm_without_epilogue() -> None:
    a, b = te.placeholder((20, 30), name="a"), te.placeholder((2, 30, 16), name="b")
    arrays = [random(RNG, a), random(RNG, b)]
    expected = arrays[0].astype("float64") @ arrays[1].astype("float64").transpose(1, 0, 2).reshape(30, 32)
    check(GEMM, te.create_prim_func([a, b, dense_packed(a, b)]), arrays, expected, RNG)


CONVS = {
    # ic blocks, ic, oc blocks, height, width, kernel, stride, pads, dilation, groups
    "3x3": (2, 16, 4, 14, 14, 3, 1, (1, 1, 1, 1), 1, 1),
    "pointwise": (2, 16, 2, 9, 7, 1, 1, (0, 0, 0, 0), 1, 1),
    "pointwise, grouped": (4, 16, 4, 7, 7, 1, 1, (0, 0, 0, 0), 1, 2),
    "stem": (1, 3, 2, 23, 23, 7, 2, (3, 3, 3, 3), 1, 1),
    "ragged width": (1, 16, 2, 5, 31, 3, 1, (1, 1, 1, 1), 1, 1),
    "one row": (2, 16, 3, 1, 53, (1, 5), (1, 2), (0, 2, 0, 2), 1, 1),
    "a line in chunks": (2, 16, 4, 1, 97, (1, 3), (1, 2), (0, 1, 0, 1), 1, 1),
    "dilated, uneven padding": (1, 16, 1, 11, 12, 3, 1, (2, 1, 2, 3), 2, 1),
    "grouped, strided": (4, 16, 4, 10, 10, 3, 2, (1, 1, 1, 1), 1, 2),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CONVS)
def test_conv2d_with_epilogue(name: str) -> None:
    torch = pytest.importorskip("torch")
    icb, ic, ocb, h, w, kernel_size, stride, pads, dilation, groups = CONVS[name]
    kh, kw = kernel_size if isinstance(kernel_size, tuple) else (kernel_size, kernel_size)
    strides = stride if isinstance(stride, tuple) else (stride, stride)
    data = te.placeholder((1, icb, h, w, ic), name="data")
    weight = te.placeholder((ocb, icb // groups, kh, kw, ic, 16), name="weight")
    conv = conv2d_nchwc(data, weight, strides, pads, (dilation, dilation), groups)
    bias = te.placeholder((1, ocb, 1, 1, 16), name="bias")
    zero = tirx.const(0, "float32")
    out = te.compute(conv.shape, lambda n, o, y, x, c: tirx.max(conv[n, o, y, x, c] + bias[0, o, 0, 0, c], zero))
    arrays = [random(RNG, t) for t in (data, weight, bias)]
    plain = torch.tensor(arrays[0]).permute(0, 1, 4, 2, 3).reshape(1, icb * ic, h, w).double()
    kernel = torch.tensor(arrays[1]).permute(0, 5, 1, 4, 2, 3).reshape(ocb * 16, icb // groups * ic, kh, kw).double()
    plain = torch.nn.functional.pad(plain, (pads[1], pads[3], pads[0], pads[2]))
    y = torch.nn.functional.conv2d(plain, kernel, stride=strides, dilation=dilation, groups=groups)
    y = (y + torch.tensor(arrays[2].reshape(1, ocb * 16, 1, 1))).clamp(min=0)
    expected = y.reshape(1, ocb, 16, *y.shape[2:]).permute(0, 1, 3, 4, 2).numpy()
    check(CONV2D, te.create_prim_func([data, weight, bias, out]), arrays, expected, RNG, count=1)


def _pointwise(n: int | tirx.Var, size: int) -> tirx.PrimFunc:
    data = te.placeholder((n, 2, size, size, 16), name="data")
    weight = te.placeholder((4, 2, 1, 1, 16, 16), name="weight")
    conv = conv2d_nchwc(data, weight, (1, 1), (0, 0, 0, 0), (1, 1), 1)
    return te.create_prim_func([data, weight, te.compute(conv.shape, lambda *i: conv(*i) + 1.0)])


@pytest.mark.parametrize("size", [7, 13, 14, 27])
def test_tiles_of_a_pointwise_convolution_run_on_from_row_to_row(size: int) -> None:
    """At most one tile of a chunk of rows is ragged, and full ones test nothing: with 16 registers, whose tiles are of
    few pixels, one tile of each row would be."""
    target = TARGETS[8]
    func = _pointwise(1, size)
    decisions = next(iter(CONV2D.seeds(func, target)))
    ow, rows = decisions["ow"], decisions["rows"]
    sch = schedule_with(CONV2D, func, target, decisions)
    hinted = r"in T\.serial\((\d+), annotations={\"pragma_loop_partition_hint"
    tiles = [int(n) for n in re.findall(hinted, str(sch.mod))]
    assert tiles == ([-(-rows * size // ow)] if rows * size % ow else [])
    lowered: list[str] = []
    with target, tvm.transform.PassContext(instruments=[_Lowered(lowered)]):
        tvm.compile(sch.mod, target=target, tir_pipeline=PIPELINE)
    assert lowered and not any(re.search(r"\bif \w*ax\d", text) for text in lowered)


@pytest.mark.parametrize("lanes", TARGETS)
def test_chunks_of_a_long_line_read_what_stays_in_the_second_cache(lanes: int) -> None:
    """The second layer of wav2vec 2.0 reads 6.5 MB: in chunks of the whole line each panel of weights would read it
    from the third level again."""
    data, weight = te.placeholder((1, 32, 1, 3199, 16)), te.placeholder((32, 32, 1, 3, 16, 16))
    func = te.create_prim_func([data, weight, conv2d_nchwc(data, weight, (1, 2), (0, 0, 0, 0), (1, 1), 1)])
    rows = next(iter(CONV2D.seeds(func, TARGETS[lanes])))["rows"]
    assert 6 <= rows < 1599 and (2 * rows + 1) * 512 * 4 < cpu_machine(TARGETS[lanes]).l2_bytes


@pytest.mark.parametrize(("kernel", "stride", "apart"), [(3, 2, 1), (3, 1, 1), (2, 2, 0), (1, 1, 0)])
def test_columns_that_share_more_pixels_than_registers_are_kept_apart(kernel: int, stride: int, apart: int) -> None:
    """Of three channels, with tiles of 12 sums."""
    data = te.placeholder((1, 1, 31, 31, 3), name="data")
    weight = te.placeholder((1, 1, kernel, kernel, 3, 16), name="weight")
    conv = conv2d_nchwc(data, weight, (stride, stride), (0, 0, 0, 0), (1, 1), 1)
    func = te.create_prim_func([data, weight, te.compute(conv.shape, lambda *i: conv(*i) + 1.0)])
    first = next(iter(CONV2D.seeds(func, resolve("x86-64-v3", threads=2).tvm)))
    assert first["ow"] * first["oh"] >= 4
    assert first["prefetch"] == apart


@tvm.ir.instrument.pass_instrument
class _Lowered:
    """Keeps the text of what the code generator is given."""

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts

    def run_after_pass(self, mod: tvm.IRModule, info: tvm.transform.PassInfo) -> None:
        if info.name == "tirx.MakePackedAPI":
            self._texts.append(str(mod))


TRANSPOSED = {
    # height, width, kernel, strides, pads, output padding, groups
    "doubled": (7, 9, (4, 4), (2, 2), (1, 1, 1, 1), (0, 0), 1),
    "no overlap": (6, 7, (2, 2), (2, 2), (0, 0, 0, 0), (0, 0), 1),
    "phases of different sizes": (7, 8, (3, 3), (2, 2), (1, 1, 1, 1), (1, 0), 1),
    "uneven": (5, 6, (5, 2), (3, 1), (2, 0, 1, 1), (1, 0), 1),
    "more cut than a tap sees": (5, 6, (2, 3), (2, 2), (1, 2, 1, 2), (0, 1), 1),
    "gaps": (4, 5, (2, 1), (3, 2), (0, 0, 0, 0), (2, 1), 1),
    "one row": (1, 20, (1, 4), (1, 3), (0, 0, 0, 1), (0, 0), 1),
    "one input": (1, 1, (4, 3), (1, 2), (0, 1, 0, 0), (0, 0), 1),
    "stride one": (6, 5, (3, 3), (1, 1), (1, 1, 0, 1), (0, 0), 1),
    "groups": (5, 13, (4, 4), (2, 2), (1, 1, 1, 1), (0, 0), 2),
}


def _scattered(x: np.ndarray, w: np.ndarray, strides: Sequence[int], groups: int) -> np.ndarray:
    """Transposed convolution by definition: every input adds the kernel, times itself, to the result."""
    n, ic, h, width = x.shape
    _, oc, kh, kw = w.shape
    y = np.zeros((n, groups * oc, (h - 1) * strides[0] + kh, (width - 1) * strides[1] + kw))
    for g, i, j in np.ndindex(groups, h, width):
        part = slice(g * ic // groups, (g + 1) * ic // groups)
        added = np.einsum("nc,cokl->nokl", x[:, part, i, j], w[part])
        place = y[:, g * oc : (g + 1) * oc, i * strides[0] :, j * strides[1] :]
        place[:, :, :kh, :kw] += added
    return y


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", TRANSPOSED)
def test_transposed_convolution(name: str) -> None:
    h, w, kernel, strides, pads, extra, groups = TRANSPOSED[name]
    rows, columns = axes((h, w), kernel, strides, pads, extra)
    ic, oc = 32, 48 * groups
    image, weight = RNG.standard_normal((1, ic, h, w)), RNG.standard_normal((ic, oc // groups, *kernel))
    full = np.pad(_scattered(image, weight, strides, groups), ((0, 0), (0, 0), (0, 20), (0, 20)))
    phases = phase_weight(weight, rows, columns, groups)
    packed = phases.reshape(-1, 16, ic // groups // 16, 16, *phases.shape[3:]).transpose(0, 2, 4, 5, 3, 1)
    data, panels = te.placeholder((1, ic // 16, h, w, 16), name="data"), te.placeholder(packed.shape, name="weight")
    bias = te.placeholder((1, oc // 16, 1, 1, 16), name="bias")
    conv = conv2d_transpose_nchwc(data, panels, rows, columns, groups)
    zero = tirx.const(0, "float32")
    out = te.compute(conv.shape, lambda n, o, y, x, c: tirx.max(conv[n, o, y, x, c] + bias[0, o, 0, 0, c], zero))
    wanted = full[:, :, pads[0] :, pads[1] :][:, :, : int(out.shape[2]), : int(out.shape[3])]
    blocked = [a.reshape(1, -1, 16, *a.shape[2:]).transpose(0, 1, 3, 4, 2) for a in (image, wanted)]
    arrays = [np.ascontiguousarray(a, "float32") for a in (blocked[0], packed)] + [random(RNG, bias)]
    expected = np.maximum(blocked[1] + arrays[2], 0)
    check(CONV2D, te.create_prim_func([data, panels, bias, out]), arrays, expected, RNG, count=1)


def _dense_function() -> tirx.PrimFunc:
    a, b = te.placeholder((32, 24), name="a"), te.placeholder((2, 24, 16), name="b")
    return te.create_prim_func([a, b, dense_packed(a, b)])


def _transposed_function() -> tirx.PrimFunc:
    rows, columns = axes((5, 9), (4, 4), (2, 2), (1, 1, 1, 1), (0, 0))
    data, weight = te.placeholder((1, 1, 5, 9, 16), name="data"), te.placeholder((8, 1, 2, 2, 16, 16), name="weight")
    return te.create_prim_func([data, weight, conv2d_transpose_nchwc(data, weight, rows, columns, 1)])


@pytest.mark.parametrize(("space", "func"), [(GEMM, _dense_function()), (CONV2D, _transposed_function())])
def test_trace_replays_on_a_fresh_function(space: Space, func: tirx.PrimFunc) -> None:
    target = NATIVE
    sch = schedule_with(space, func, target, next(iter(space.seeds(func, target))))
    text = json.dumps(json.loads(tvm.ir.save_json(sch.trace.as_json())))
    fresh = s_tir.Schedule(func)
    s_tir.Trace.apply_json_to_schedule(tvm.ir.load_json(text), fresh)
    tvm.ir.assert_structural_equal(fresh.mod["main"], sch.mod["main"])


def test_spaces_decline_what_is_not_theirs() -> None:
    x = te.placeholder((16, 16), name="x")
    relu = te.create_prim_func([x, te.compute((16, 16), lambda i, j: tirx.max(x[i, j], tirx.const(0, "float32")))])
    r = te.reduce_axis((0, 16))
    total = te.create_prim_func([x, te.compute((16,), lambda i: te.sum(x[i, r], axis=[r]))])
    for func in (relu, total):
        assert not GEMM.matches(func, NATIVE)
        assert not CONV2D.matches(func, NATIVE)
        assert not WINOGRAD.matches(func, NATIVE)


# -- the contract


def _product_case(name: str) -> Case:
    kind, batch, m, n, k = GEMMS[name]

    def build() -> list[te.Tensor]:
        a = te.placeholder((batch, m, k), name="a")
        if kind == "packed":
            b = te.placeholder((n // 16, k, 16), name="b")
            return [a, b, dense_packed(a, b)]
        b, r = te.placeholder((batch, k, n), name="b"), te.reduce_axis((0, k), name="r")
        return [a, b, te.compute((batch, m, n), lambda x, i, j: te.sum(a[x, i, r] * b[x, r, j], axis=[r]), name="c")]

    def reference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return a @ (b.transpose(1, 0, 2).reshape(k, n) if kind == "packed" else b)

    return Case(name, build, reference)


class TestGemm(SpaceContract):
    space = GEMM
    cases = tuple(map(_product_case, [name for name in GEMMS if name != "batched, odd depth"]))  # too small for threads
