"""Products and convolutions of 8-bit integers: exact on random data with extremes, and on the right instructions."""

from __future__ import annotations

import re
import subprocess
import sys
import zlib
from functools import partial
from itertools import starmap
from types import SimpleNamespace

import numpy as np
import pytest
import tvm
from harness import CORES, TARGET, Case, SpaceContract, pytest_generate_tests
from tvm import s_tir, te, tirx

from mlc.graph.kernels.integer import (
    conv2d_nchwc_integer,
    dense_integer,
    depthwise_nchwc_integer,
    depthwise_nchwc_taps,
    dot_form,
    has_taps,
    pack_conv,
    pack_dense,
    pack_taps,
)
from mlc.target import resolve
from schedules.analysis import walk
from schedules.cpu.conv import CONV2D_INTEGER, DEPTHWISE_INTEGER
from schedules.cpu.depthwise import DEPTHWISE
from schedules.cpu.gemm import GEMM_INTEGER
from schedules.intrin import select
from schedules.intrin.dot import QUADS, TAPS, WORDS, dot
from schedules.lowering import PIPELINE
from schedules.registry import find
from schedules.space import Decisions, InvalidDecision, Space, first_seed, schedule_with
from schedules.trace import trace_json

__all__ = ["pytest_generate_tests"]

#: every form and width: by name, what their instruction is called and which features running them needs
TARGETS = {
    "x86-64-v2": ("pmaddwd", ("sse4.2",)),
    "x86-64-v3": ("vpmaddwd", ("avx2",)),
    "x86-64-v4": ("vpmaddwd", ("avx512bw", "avx512vl")),
    "x86-64-v4 -mattr=+avx512vnni": ("vpdpbusd", ("avx512bw", "avx512vl", "avx512vnni")),
    "llvm -mcpu=alderlake": ("vpdpbusd", ("avxvnni",)),
}
X86 = "x86" in str(tvm.target.codegen.llvm_get_system_triple())
pytestmark = pytest.mark.skipif(not X86, reason="the kernels' instructions are x86's")


def _runs(name: str) -> bool:
    with TARGET:
        return all(tvm.target.codegen.llvm_cpu_has_features(feature, TARGET) for feature in TARGETS[name][1])


def _target(name: str) -> tvm.target.Target:
    return resolve(name, threads=CORES).tvm


def _extreme(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Random, with every third value at an end of its range."""
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    ends = rng.choice([low, high], shape)
    return np.where(rng.random(shape) < 1 / 3, ends, rng.integers(low, high + 1, shape)).astype(dtype)


def _convolved(
    data: np.ndarray, weight: np.ndarray, strides: tuple[int, int], pads: tuple[int, ...], dilation: tuple[int, int],
    groups: int, zero: int,
) -> np.ndarray:
    """The definition in int64: ``[N, C, H, W]`` by ``[O, C/groups, KH, KW]``."""
    top, left, bottom, right = pads
    data = np.pad(data.astype("int64"), ((0, 0), (0, 0), (top, bottom), (left, right)), constant_values=zero)
    (filters, each, kh, kw), (sh, sw), (dh, dw) = weight.shape, strides, dilation
    height = (data.shape[2] - (kh - 1) * dh - 1) // sh + 1
    width = (data.shape[3] - (kw - 1) * dw - 1) // sw + 1
    out = np.zeros((len(data), groups, filters // groups, height, width), "int64")
    for g in range(groups):
        filters_of_group = weight.reshape(groups, -1, each, kh, kw)[g].astype("int64")
        for y in range(kh):
            for x in range(kw):
                rows = slice(y * dh, y * dh + (height - 1) * sh + 1, sh)
                columns = slice(x * dw, x * dw + (width - 1) * sw + 1, sw)
                window = data[:, g * each : (g + 1) * each, rows, columns]
                out[:, g] += np.einsum("nihw,oi->nohw", window, filters_of_group[:, :, y, x])
    return out.reshape(len(data), filters, height, width)


def _blocked(images: np.ndarray, block: int, groups: int = 1) -> np.ndarray:
    """``[N, C, H, W]`` as ``[N, C/b, H, W, b]``, each group's channels padded to whole blocks."""
    n, channels, height, width = images.shape
    cut = images.reshape(n, groups, channels // groups, height, width)
    cut = np.pad(cut, ((0, 0), (0, 0), (0, -cut.shape[2] % block), (0, 0), (0, 0)))
    return np.ascontiguousarray(cut.reshape(n, -1, block, height, width).transpose(0, 1, 3, 4, 2))


def _requantised(sums: te.Tensor, scale: te.Tensor) -> te.Tensor:
    """uint8 of ``sums * scale``, a factor for each element of the last axis, to the nearest, ties to even."""

    def value(*index: tirx.Var) -> tirx.Expr:
        nearest = tirx.round(tirx.min(sums[index].astype("float32") * scale[index[-1]], tirx.const(255.0, "float32")))
        return tirx.max(nearest.astype("int32"), tirx.const(0, "int32")).astype("uint8")

    return te.compute(sums.shape, value, name="requantised")


def _as_uint8(sums: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(sums.astype("float32") * scale), 0, 255).astype("uint8")


class _Dense:
    """A product and its data: ``[*batch, m, k] x [k, n]``, as sums or requantised."""

    def __init__(self, form: str, m: int, n: int, k: int, batch: tuple[int, ...] = (), to_uint8: bool = False) -> None:
        rng = np.random.default_rng(zlib.crc32(repr((m, n, k, batch)).encode()))
        data, weight = _extreme(rng, (*batch, m, k), "uint8"), _extreme(rng, (k, n), "int8")
        data[..., 0, :], weight[:, 0] = 255, -128
        packed = pack_dense(weight, form)
        columns = packed.shape[0] * 16
        whole = np.pad(data, [(0, 0)] * (data.ndim - 1) + [(0, -k % 4)])
        sums = np.zeros((*batch, m, columns), "int64")
        sums[..., :n] = data.astype("int64") @ weight.astype("int64")
        x = te.placeholder(whole.shape, "uint8", name="x")
        w = te.placeholder(packed.shape, str(packed.dtype), name="w")
        product = dense_integer(x, w)
        self.arrays, self.expected = [whole, packed], sums
        tensors = [x, w, product]
        if to_uint8:
            scale = rng.uniform(1e-4, 1e-3, columns).astype("float32")
            tensors[2:] = [s := te.placeholder((columns,), name="scale"), _requantised(product, s)]
            self.arrays, self.expected = [*self.arrays, scale], _as_uint8(sums, scale)
        self.func = te.create_prim_func(tensors)


class _Conv:
    """A convolution and its data in blocks of ``inner`` and ``outer`` channels."""

    def __init__(
        self, form: str, image: tuple[int, int, int, int], filters: int, kernel: tuple[int, int],
        strides: tuple[int, int] = (1, 1), pads: tuple[int, int, int, int] = (0, 0, 0, 0),
        dilation: tuple[int, int] = (1, 1), groups: int = 1, inner: int = 16, outer: int = 16, zero: int = 0,
        to_uint8: bool = False,
    ) -> None:
        rng = np.random.default_rng(zlib.crc32(repr((image, filters, kernel, strides)).encode()))
        data = _extreme(rng, image, "uint8")
        weight = _extreme(rng, (filters, image[1] // groups, *kernel), "int8")
        packed, blocked = pack_conv(weight, inner, outer, groups, form), _blocked(data, inner, groups)
        sums = _blocked(_convolved(data, weight, strides, pads, dilation, groups, zero), outer, groups)
        x = te.placeholder(blocked.shape, "uint8", name="x")
        w = te.placeholder(packed.shape, str(packed.dtype), name="w")
        convolution = conv2d_nchwc_integer(x, w, strides, pads, dilation, groups, zero)
        self.arrays, self.expected = [blocked, packed], sums
        tensors = [x, w, convolution]
        if to_uint8:
            scale = rng.uniform(1e-4, 1e-3, outer).astype("float32")
            tensors[2:] = [s := te.placeholder((outer,), name="scale"), _requantised(convolution, s)]
            self.arrays, self.expected = [*self.arrays, scale], _as_uint8(sums, scale)
        self.func = te.create_prim_func(tensors)


DENSE = {
    "even": partial(_Dense, m=72, n=64, k=64),  # no whole tiles of rows, which a matrix unit would take
    "ragged": partial(_Dense, m=53, n=70, k=38),
    "batch": partial(_Dense, m=9, n=48, k=20, batch=(2, 3)),
    "vector": partial(_Dense, m=1, n=256, k=512),
    "few_rows": partial(_Dense, m=5, n=100, k=256),
    "deep": partial(_Dense, m=24, n=16, k=4096),
    "small": partial(_Dense, m=3, n=5, k=4),
    "requantised": partial(_Dense, m=50, n=96, k=64, to_uint8=True),
}
CONVOLUTIONS = {
    "pointwise": partial(_Conv, image=(2, 24, 9, 9), filters=40, kernel=(1, 1)),
    "padded": partial(_Conv, image=(1, 64, 14, 14), filters=32, kernel=(3, 3), pads=(1, 1, 1, 1), zero=255),
    "strided": partial(_Conv, image=(1, 32, 15, 17), filters=64, kernel=(1, 1), strides=(2, 2)),
    "first": partial(_Conv, image=(1, 3, 20, 22), filters=16, kernel=(7, 7), strides=(2, 2), pads=(3, 3, 3, 3),
                     inner=4, zero=7),
    "grouped": partial(_Conv, image=(1, 48, 7, 9), filters=48, kernel=(3, 3), pads=(1, 1, 1, 1), groups=3, inner=8,
                       outer=8, zero=128),
    "ragged_groups": partial(_Conv, image=(1, 20, 6, 5), filters=12, kernel=(2, 3), groups=2, inner=4, outer=8),
    "dilated": partial(_Conv, image=(1, 16, 14, 15), filters=32, kernel=(3, 3), strides=(2, 1), pads=(0, 1, 1, 1),
                       dilation=(1, 2), zero=3),
    "narrow": partial(_Conv, image=(1, 20, 7, 9), filters=8, kernel=(2, 3), pads=(1, 0, 1, 0), inner=4, outer=4),
    "requantised": partial(_Conv, image=(1, 32, 13, 13), filters=32, kernel=(3, 3), pads=(1, 1, 1, 1), zero=128,
                           to_uint8=True),
}
SPACES: dict[str, Space] = {**dict.fromkeys(DENSE, GEMM_INTEGER), **dict.fromkeys(CONVOLUTIONS, CONV2D_INTEGER)}


def _case(name: str, built: _Dense | _Conv) -> Case:
    return Case(name, lambda: built.func, lambda *_: built.expected, data=lambda: built.arrays)


def _check(case: _Dense | _Conv | SimpleNamespace, sch: s_tir.Schedule, target: tvm.target.Target) -> None:
    out = tvm.runtime.tensor(np.full(case.expected.shape, 77, str(case.func.params[-1].dtype)))
    tvm.compile(sch.mod, target=target, tir_pipeline=PIPELINE)["main"](*map(tvm.runtime.tensor, case.arrays), out)
    np.testing.assert_array_equal(out.numpy(), case.expected)


def _points(space: Space, func: tirx.PrimFunc, target: tvm.target.Target, count: int) -> list[s_tir.Schedule]:
    """The first seed and ``count`` random points that the program accepts."""
    rng, found = np.random.default_rng(1), [first_seed(space, func, target)[0]]
    knobs = space.knobs(func, target)
    for _ in range(400):
        point: Decisions = {k.name: int(rng.choice(k.values)) for k in knobs}
        if len(found) > count:
            break
        if np.prod([point.get(name, 1) for name in ("ow", "oh", "oc", "m", "n", "ic", "k")]) <= 512:  # build time
            try:
                found.append(schedule_with(space, func, target, point))
            except InvalidDecision:
                continue
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", [*DENSE, *(f"conv_{name}" for name in CONVOLUTIONS)])
def test_sums_are_exact(case: str, target: str) -> None:
    if not _runs(target):
        pytest.skip(f"this machine has no {TARGETS[target][0]}")
    on, name = _target(target), case.removeprefix("conv_")
    built = (CONVOLUTIONS if name != case else DENSE)[name](dot_form(on))
    space = find(built.func, on)
    assert space is (CONV2D_INTEGER if name != case else GEMM_INTEGER)
    for sch in _points(space, built.func, on, 2):
        _check(built, sch, on)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["padded", "first", "grouped", "dilated", "narrow"])
def test_every_chunk_of_channels_may_pad_the_image_itself(name: str, target: str) -> None:
    if not _runs(target):
        pytest.skip(f"this machine has no {TARGETS[target][0]}")
    on = _target(target)
    built = CONVOLUTIONS[name](dot_form(on))
    filters = max(next(knob for knob in CONV2D_INTEGER.knobs(built.func, on) if knob.name == "oc").values)
    point = {**first_seed(CONV2D_INTEGER, built.func, on)[1], "order": 1, "pad": 1}
    for blocks in {1, filters}:
        sch = schedule_with(CONV2D_INTEGER, built.func, on, {**point, "ow": 3, "oh": 1, "oc": 1, "groups": blocks})
        parallel = [loop for loop in _loops(sch) if loop.kind == tirx.ForKind.PARALLEL]
        assert len(parallel) <= 1, "the padded image must be made where it is read"
        _check(built, sch, on)


def _loops(sch: s_tir.Schedule) -> list[tirx.For]:
    found: list[tirx.For] = []
    walk(sch.mod["main"].body, (tirx.For, found.append))
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_neighbours_are_computed_in_the_same_function(target: str) -> None:
    """Rows are quantised before a product; after a convolution comes the sum with another image of another scale."""
    if not _runs(target):
        pytest.skip(f"this machine has no {TARGETS[target][0]}")
    on, rng = _target(target), np.random.default_rng(5)
    form, zero = dot_form(on), 30
    rows, weight = rng.uniform(-4, 4, (19, 48)).astype("float32"), _extreme(rng, (48, 32), "int8")
    x, packed = te.placeholder(rows.shape, name="x"), pack_dense(weight, form)
    w = te.placeholder(packed.shape, str(packed.dtype), name="w")
    quantised = te.compute(x.shape, lambda i, j: _to_uint8(tirx.round(x[i, j] * 32.0) + float(zero)), name="quantised")
    case = SimpleNamespace(func=te.create_prim_func([x, w, dense_integer(quantised, w)]), arrays=[rows, packed])
    case.expected = np.clip(np.rint(rows * np.float32(32)) + zero, 0, 255).astype("int64") @ weight.astype("int64")
    _check(case, first_seed(GEMM_INTEGER, case.func, on)[0], on)

    image, other = _extreme(rng, (1, 32, 9, 9), "uint8"), _extreme(rng, (1, 2, 9, 9, 16), "uint8")
    kernel = rng.integers(-8, 9, (32, 32, 3, 3)).astype("int8")
    packed, blocked = pack_conv(kernel, 16, 16, 1, form), _blocked(image, 16)
    x, w = te.placeholder(blocked.shape, "uint8", name="x"), te.placeholder(packed.shape, str(packed.dtype), name="w")
    y = te.placeholder(other.shape, "uint8", name="y")
    sums = conv2d_nchwc_integer(x, w, (1, 1), (1, 1, 1, 1), (1, 1), 1, zero)

    def added(*index: tirx.Var) -> tirx.Expr:
        branch = (y[index].astype("float32") - float(zero)) * 0.5
        return _to_uint8(tirx.round(tirx.max(sums[index].astype("float32") * 0.0078125 + branch, 0.0)))

    case.func = te.create_prim_func([x, w, y, te.compute(sums.shape, added, name="added")])
    exact = _blocked(_convolved(image, kernel, (1, 1), (1, 1, 1, 1), (1, 1), 1, zero), 16)
    case.arrays = [blocked, packed, other]
    branch = (other.astype("float32") - zero) * np.float32(0.5)
    case.expected = np.clip(np.rint(np.maximum(exact.astype("float32") * np.float32(0.0078125) + branch, 0)), 0, 255)
    case.expected = case.expected.astype("uint8")
    _check(case, first_seed(CONV2D_INTEGER, case.func, on)[0], on)


def _to_uint8(value: tirx.Expr) -> tirx.Expr:
    clipped = tirx.min(value, tirx.const(255.0, "float32")).astype("int32")
    return tirx.max(clipped, tirx.const(0, "int32")).astype("uint8")


_FORM = dot_form(TARGET) if X86 else QUADS


class TestGemm(SpaceContract):
    space = GEMM_INTEGER
    cases = tuple(_case(name, make(_FORM)) for name, make in DENSE.items())


class TestConv2d(SpaceContract):
    space = CONV2D_INTEGER
    cases = tuple(_case(name, make(_FORM)) for name, make in CONVOLUTIONS.items())


# -- the instructions


def _hot_loop(case: _Dense | _Conv, name: str) -> tuple[str, dict[str, int]]:
    """The first seed's loop with the most products, as assembly, and the seed."""
    on = _target(name)
    sch, decisions = first_seed(find(case.func, on), case.func, on)
    assembly = tvm.compile(sch.mod, target=on, tir_pipeline=PIPELINE).mod.inspect_source("s")
    blocks = re.split(r"\n(?=\.L\w+:)", assembly)
    hot = max(blocks, key=lambda block: block.count(TARGETS[name][0]))
    return re.split(r"\tj\w+\t\.L", hot)[0], decisions


def _stored(loop: str) -> int:
    """How many vectors the loop puts on the stack."""
    return len(re.findall(r"mov\w*\s+%[xyz]mm\d+, .*\(%rsp", loop))


@pytest.mark.parametrize("name", TARGETS)
def test_instructions_of_a_product(name: str) -> None:
    """A whole number of tiles a pass through the loop, each product by its instruction, and nothing spilt."""
    on = _target(name)
    form, word = dot_form(on), TARGETS[name][0]
    loop, seed = _hot_loop(_Dense(form, m=240, n=192, k=2048), name)
    vectors = seed["n"] * 4 // {"x86-64-v2": 16, "x86-64-v3": 32, "llvm -mcpu=alderlake": 32}.get(name, 64)
    products = seed["m"] * vectors * seed["k"]
    count = len(re.findall(rf"\s{word}\s", loop))
    assert count
    assert count % products == 0
    assert _stored(loop) <= 1
    if form == WORDS:
        assert not re.search("maddubs|psrlw|pmov|punpck|pand", loop), "nothing is widened in the loop"
        assert len(re.findall(r"v?paddd\s", loop)) == count


@pytest.mark.parametrize("name", TARGETS)
def test_instructions_of_a_convolution(name: str) -> None:
    on = _target(name)
    case = _Conv(dot_form(on), (1, 64, 28, 28), 64, (3, 3), pads=(1, 1, 1, 1))
    loop, _ = _hot_loop(case, name)
    products = len(re.findall(rf"\s{TARGETS[name][0]}\s", loop))
    assert products >= 32
    assert _stored(loop) < products / 10  # pixels that the taps of a row share, where LLVM has unrolled them


@pytest.mark.parametrize("name", TARGETS)
def test_sums_of_a_pointwise_convolution_stay_in_registers(name: str) -> None:
    """A sum on the stack is written and read again in each step: half the rate, were it one of twelve."""
    loop, _ = _hot_loop(_Conv(dot_form(_target(name)), (1, 256, 28, 28), 64, (1, 1)), name)
    assert len(re.findall(rf"\s{TARGETS[name][0]}\s", loop)) >= 32
    assert _stored(loop) == 0


@pytest.mark.parametrize("name", TARGETS)
def test_requantisation_is_vectors(name: str) -> None:
    """Sums become uint8 without a scalar step or a call of the mathematical library."""
    on = _target(name)
    for make in (DENSE["requantised"], CONVOLUTIONS["requantised"]):
        case = make(dot_form(on))
        sch = first_seed(find(case.func, on), case.func, on)[0]
        assembly = tvm.compile(sch.mod, target=on, tir_pipeline=PIPELINE).mod.inspect_source("s")
        assert re.search(r"roundps|rndscaleps", assembly)
        assert not re.search(r"roundss|cvttss2si|nearbyintf|roundf|pextrb|rndscaless", assembly)


# -- forms, packings, intrinsics


@pytest.mark.parametrize(("name", "form"), [
    ("x86-64", WORDS), ("x86-64-v2", WORDS), ("x86-64-v3", WORDS), ("x86-64-v4", WORDS), ("cuda:sm_90", WORDS),
    ("x86-64-v4 -mattr=+avx512vnni", QUADS), ("llvm -mcpu=alderlake", QUADS), ("llvm -mcpu=cascadelake", QUADS),
])
def test_form_of_a_target(name: str, form: str) -> None:
    assert dot_form(resolve(name)) == dot_form(resolve(name).tvm) == form


def test_packed_products() -> None:
    """Element by element; what pads is zero."""
    weight = np.random.default_rng(0).integers(-128, 128, (10, 21), "int8")
    quads, words = pack_dense(weight, QUADS), pack_dense(weight, WORDS)
    assert (quads.shape, quads.dtype) == ((2, 3, 16, 4), np.int8)
    assert (words.shape, words.dtype) == ((2, 6, 16, 2), np.int16)
    for k in range(12):
        for n in range(32):
            value = weight[k, n] if k < 10 and n < 21 else 0
            assert quads[n // 16, k // 4, n % 16, k % 4] == value
            assert words[n // 16, k // 2, n % 16, k % 2] == value


@pytest.mark.parametrize("groups", [1, 2])
def test_packed_convolutions(groups: int) -> None:
    weight = np.random.default_rng(0).integers(-128, 128, (20, 6, 2, 3), "int8")
    quads, words = pack_conv(weight, 4, 8, groups, QUADS), pack_conv(weight, 4, 8, groups, WORDS)
    each, blocks = 20 // groups, -(-20 // groups // 8)
    assert quads.shape == (blocks * groups, 2, 2, 3, 1, 8, 4)
    assert words.shape == (blocks * groups, 2, 2, 3, 2, 8, 2)
    assert np.count_nonzero(quads) == np.count_nonzero(words) == np.count_nonzero(weight)
    for (o, i, y, x), value in np.ndenumerate(weight):
        block, lane = o // each * blocks + o % each // 8, o % each % 8
        assert quads[block, i // 4, y, x, 0, lane, i % 4] == value
        assert words[block, i // 4, y, x, i % 4 // 2, lane, i % 2] == value
    if groups == 1:
        cut = np.pad(weight, ((0, 4), (0, 2), (0, 0), (0, 0))).reshape(3, 8, 2, 4, 2, 3).transpose(0, 2, 4, 5, 3, 1)
        np.testing.assert_array_equal(pack_conv(cut, 4, 8, 1, QUADS), quads)


def test_blocks_of_a_packing() -> None:
    with pytest.raises(ValueError, match="whole steps of 4"):
        pack_conv(np.zeros((8, 6, 1, 1), "int8"), 6, 8, 1, QUADS)


def test_a_trace_replays_elsewhere() -> None:
    """In a process that has built no intrinsic, as in a worker that measures."""
    program = """
from tvm import te
from mlc.graph.kernels.integer import dense_integer
from schedules.trace import replay
import sys
x, w = te.placeholder((8, 16), "uint8"), te.placeholder((1, 4, 16, 4), "int8")
print("vpdpbusd" in replay(te.create_prim_func([x, w, dense_integer(x, w)]), sys.stdin.read()).mod.script())
"""
    on = _target("llvm -mcpu=alderlake")
    x, w = te.placeholder((8, 16), "uint8"), te.placeholder((1, 4, 16, 4), "int8")
    func = te.create_prim_func([x, w, dense_integer(x, w)])
    trace = trace_json(first_seed(GEMM_INTEGER, func, on)[0])
    done = subprocess.run([sys.executable, "-c", program], input=trace, text=True, capture_output=True)
    assert done.stdout == "True\n", done.stderr


# -- depthwise


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize(("stride", "kernel", "zero"), [(1, 3, 255), (2, 3, 0), (1, 5, 7)])
def test_depthwise(name: str, stride: int, kernel: int, zero: int) -> None:
    if not _runs(name):
        pytest.skip(f"this machine has no {TARGETS[name][0]}")
    on, rng, pad = _target(name), np.random.default_rng(kernel), kernel // 2
    data, weight = _extreme(rng, (1, 32, 15, 17), "uint8"), _extreme(rng, (32, 1, kernel, kernel), "int8")
    packed = weight.reshape(2, 16, 1, kernel, kernel, 1).transpose(0, 2, 3, 4, 5, 1)
    blocked = _blocked(data, 16)
    x, w = te.placeholder(blocked.shape, "uint8", name="x"), te.placeholder(packed.shape, "int8", name="w")
    sums = depthwise_nchwc_integer(x, w, (stride, stride), (pad,) * 4, (1, 1), zero)
    func = te.create_prim_func([x, w, sums])
    space = find(func, on)
    assert space is DEPTHWISE
    expected = _blocked(_convolved(data, weight, (stride, stride), (pad,) * 4, (1, 1), 32, zero), 16)
    for sch in _points(space, func, on, 2):
        out = tvm.runtime.tensor(np.zeros(expected.shape, "int32"))
        arrays = [tvm.runtime.tensor(np.ascontiguousarray(a)) for a in (blocked, packed)]
        tvm.compile(sch.mod, target=on, tir_pipeline=PIPELINE)["main"](*arrays, out)
        np.testing.assert_array_equal(out.numpy(), expected)


def _tapped(stride: int, kernel: tuple[int, int], zero: int) -> Case:
    rng = np.random.default_rng(kernel[0])
    pads = (kernel[0] // 2, kernel[1] // 2) * 2 if kernel[0] % 2 else (0, 0, 0, 0)
    data, weight = _extreme(rng, (1, 32, 15, 17), "uint8"), _extreme(rng, (32, 1, *kernel), "int8")
    packed, blocked = pack_taps(weight, 16), np.ascontiguousarray(_blocked(data, 16))
    x, w = te.placeholder(blocked.shape, "uint8", name="x"), te.placeholder(packed.shape, "int8", name="w")
    func = te.create_prim_func([x, w, depthwise_nchwc_taps(x, w, kernel[1], (stride, stride), pads, zero)])
    expected = _blocked(_convolved(data, weight, (stride, stride), pads, (1, 1), 32, zero), 16)
    return Case(f"{kernel}/{stride}", lambda: func, lambda *_: expected, data=lambda: [blocked, packed])


TAPPED = tuple(starmap(_tapped, [(1, (3, 3), 255), (2, (3, 3), 0), (1, (5, 5), 7), (1, (2, 4), 0)]))


@pytest.mark.skipif(not X86 or select(dot(TAPS, 16), TARGET) is None, reason="this machine has no dot product of taps")
class TestDepthwise(SpaceContract):
    space = DEPTHWISE_INTEGER
    cases = TAPPED


def test_depthwise_windows_take_dot_products_where_there_are_some() -> None:
    on = _target("x86-64-v4 -mattr=+avx512vnni")
    assert has_taps(resolve("x86-64-v4 -mattr=+avx512vnni"), 16) and not has_taps(resolve("x86-64-v3"), 16)
    for case in TAPPED:
        assert find(case.func(), on) is DEPTHWISE_INTEGER
        sch, _ = first_seed(DEPTHWISE_INTEGER, case.func(), on)
        assert "vpdpbusd" in tvm.compile(sch.mod, target=on, tir_pipeline=PIPELINE).mod.inspect_source("s")
