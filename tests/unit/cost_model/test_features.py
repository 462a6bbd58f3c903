"""What the features say about schedules whose properties are known."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
import tvm
from scheduled import AVX2, TARGET, elementwise, matmul, naive, tiled
from tvm import s_tir, te, tirx

from cost_model.costs import SIZES, NestCost, nest_cost
from cost_model.features import FEATURES, extract
from cost_model.features import _extract as uncached
from cost_model.machine import machine
from cost_model.nests import Nest, read_function
from cost_model.roofline import analyse as roofline
from mlc.graph.kernels.bfloat import dense_bfloat
from mlc.graph.kernels.digits import dense_digits
from mlc.graph.kernels.integer import dense_integer, dot_form, pack_dense
from mlc.graph.kernels.rounded import dense_rounded
from mlc.graph.kernels.weight_only import dense_weight_only
from mlc.target import resolve
from schedules.cpu.gemm import GEMM_BFLOAT, GEMM_INTEGER
from schedules.cpu.gemm_digits import GEMM_DIGITS
from schedules.cpu.gemm_rounded import GEMM_ROUNDED
from schedules.math import expand_math
from schedules.space import Space, schedule_with


def hottest(mod: tvm.IRModule, target: tvm.target.Target = TARGET) -> tuple[Nest, NestCost]:
    costs = [(n, nest_cost(n, machine(target))) for n in read_function(mod).nests]
    return max(costs, key=lambda pair: pair[0].flops)


def feature(mod: tvm.IRModule, name: str, target: tvm.target.Target = TARGET) -> float:
    return float(extract(mod, target).vector[FEATURES.index(name)])


def test_nests_are_the_statements_with_their_loops_and_work() -> None:
    function = read_function(tiled(matmul()))
    assert len(function.nests) == 3  # start, update, write back
    nest, _ = hottest(tiled(matmul()))
    assert nest.flops == 2 * 64 * 128 * 96 and len(nest.reduction) == 1
    assert [b.name for b in function.arguments] == ["C", "A", "B"] or {b.name for b in function.arguments} == set("ABC")
    assert [b.scope for b in function.allocations] == ["local"]
    assert sum(b.bytes for b in function.arguments) == 4 * (64 * 96 + 96 * 128 + 64 * 128)


@pytest.mark.parametrize(("target", "step", "rate"), [("x86-64-v4 -mattr=+avx512vnni", 4, 4), ("x86-64-v4", 2, 1.6)])
def test_dot_products_are_the_multiply_adds_whose_place_they_take(target: str, step: int, rate: float) -> None:
    """Four products of bytes are one of float32, or two of 16-bit numbers; these take longer."""
    on, m, n, k = resolve(target, threads=2), 48, 64, 256
    packed = pack_dense(np.zeros((k, n), "int8"), dot_form(on))
    x, w = te.placeholder((m, k), "uint8"), te.placeholder(packed.shape, str(packed.dtype))
    func = te.create_prim_func([x, w, dense_integer(x, w)])
    seed = {"m": 6, "n": 48, "mb": 1, "nb": 1, "k": 1, "order": 0, "inner": 0, "prefetch": 0, "pack": 0}
    for columns in (16, 32):
        tile = schedule_with(GEMM_INTEGER, func, on.tvm, {**seed, "n": columns}).mod
        nest, cost = hottest(tile, on.tvm)
        assert nest.flops == 2 * m * n * k / step
        assert cost.accumulators == cost.operations == 6 * columns / 16
        assert cost.loads == 6 + columns / 16 and cost.gathers == 0
        assert cost.traffic[0] <= 4 // step * (m * k * n // columns + n * k * m // 6)
    bound, widened = roofline(func, on.tvm), m * k if step == 2 else 0  # before the sums, each activation once
    assert bound.flops == 2 * m * n * k + widened
    assert bound.compute_seconds == pytest.approx((2 * m * n * k / rate + widened) / machine(on.tvm).flops, rel=1e-3)


def test_dot_products_of_bfloat16_are_read_as_the_multiply_adds_whose_place_they_take() -> None:
    on, m, n, k = resolve("llvm -mcpu=znver4", threads=2), 48, 64, 256
    x, w = te.placeholder((m, k), "bfloat16"), te.placeholder((n // 16, k // 2, 16, 2), "bfloat16")
    func = te.create_prim_func([x, w, dense_bfloat(x, w)])
    seed = {"m": 6, "n": 32, "mb": 1, "nb": 1, "k": 1, "order": 0, "inner": 0, "prefetch": 0, "pack": 0}
    nest, cost = hottest(schedule_with(GEMM_BFLOAT, func, on.tvm, seed).mod, on.tvm)
    assert nest.flops == m * n * k
    assert cost.accumulators == cost.operations == 12
    assert cost.loads == 6 + 2 and cost.gathers == 0


@pytest.mark.parametrize(("product", "space", "sums"), [
    (dense_rounded, GEMM_ROUNDED, 1), (dense_digits, GEMM_DIGITS, 3),
])
def test_dot_products_with_halves_of_bytes_are_read_as_multiply_adds(
    product: Callable[..., te.Tensor], space: Space, sums: int,
) -> None:
    """Of 8 activations two, for each of an activation's digits; what is read is the bytes."""
    on, m, n, k = resolve("x86-64-v4 -mattr=+avx512vnni", threads=2), 4, 64, 256
    x, scale = te.placeholder((m, k), name="x"), te.placeholder((n // 32, k // 32, 32), name="scale")
    w = te.placeholder((n // 32, k // 8, 32, 4), "uint8", name="w")
    func = te.create_prim_func([x, w, scale, product(x, w, scale, None, 4, 32)])
    seed = {"m": 2, "n": 32, "mb": 1, "nb": 1, "k": 2, "order": 0, "inner": 0}
    nest, cost = hottest(schedule_with(space, expand_math(func), on.tvm, seed).mod, on.tvm)
    assert nest.flops == 2 * sums * m * n * k / 4 and not nest.opaque
    assert cost.accumulators == sums * 2 * 2 and cost.gathers == 0
    (parts,) = (nest for nest in read_function(func).nests if nest.short)
    assert parts.flops == 2 * sums * m * n * k
    assert roofline(func, on.tvm).bytes == 4 * (m * k + n * k // 8 + n * k // 32 + m * n)


@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (4, 32), (6, 64), (8, 64)])
def test_the_register_tile_is_counted_in_vectors(rows: int, columns: int) -> None:
    func = matmul(48, 128, 96)
    _, cost = hottest(tiled(func, rows, columns))
    vectors = columns // 16
    assert cost.accumulators == rows * vectors and cost.operations == rows * vectors
    assert cost.loads == rows + vectors and cost.stores == 0 and cost.gathers == 0
    assert cost.inner == 96 and cost.inner_reduces


def test_spills_appear_where_the_registers_end() -> None:
    func = matmul(48, 128, 96)
    assert hottest(tiled(func, 6, 64))[1].spills == 0
    assert hottest(tiled(func, 8, 64))[1].spills > 0  # 32 accumulators and 4 operands in 32 registers
    assert hottest(tiled(func, 6, 32, 8), AVX2)[1].spills > 0  # 24 and 4 in 16


def test_few_accumulators_wait_for_the_multiply_add() -> None:
    func = matmul(48, 128, 96)
    small, large = hottest(tiled(func, 1, 16))[1], hottest(tiled(func, 6, 32))[1]
    assert small.cycles / small.operations > 4 > 1 > large.cycles / large.operations


def test_a_tile_narrower_than_a_register_wastes_lanes() -> None:
    func = matmul(64, 128, 96)
    assert hottest(tiled(func, 4, 32, 16))[1].lanes_used == 1.0
    assert hottest(tiled(func, 4, 32, 8))[1].lanes_used == 0.5
    assert hottest(tiled(func, 4, 32, 8), AVX2)[1].lanes_used == 1.0


def test_parallel_balance_is_the_part_of_the_cores_at_work() -> None:
    def balance(rows: int) -> tuple[float, float]:
        cost = hottest(tiled(matmul(48, 128, 96), rows, 32))[1]
        return cost.parallel, cost.balance

    assert balance(4) == (12, 1.0) and balance(16) == (3, 0.75)
    serial = hottest(tiled(matmul(), parallel=False))[1]
    assert serial.parallel == 1 and serial.balance == 0.5 and serial.launch == 0


def test_a_strided_vector_gathers() -> None:
    sch = s_tir.Schedule(naive(matmul(64, 64, 64)))
    i, j, k = sch.get_loops(sch.get_sblock("C"))
    sch.reorder(j, k, i)
    _, i1 = sch.split(i, [None, 16])
    sch.vectorize(i1)
    assert hottest(sch.mod)[1].gathers > 0
    assert hottest(tiled(matmul(64, 64, 64)))[1].gathers == 0


def test_traffic_is_compulsory_where_all_fits_and_grows_where_it_does_not() -> None:
    _, cost = hottest(tiled(matmul(64, 256, 64)))
    compulsory = 4 * (64 * 64 + 64 * 256)  # A and B, 80 KiB; the local accumulators cost none
    assert cost.traffic[1] == cost.traffic[2] == pytest.approx(compulsory)
    assert cost.traffic[0] > compulsory
    big = tiled(matmul(512, 2048, 512))
    _, cost = hottest(big)
    assert cost.traffic[0] >= cost.traffic[1] >= cost.traffic[2] >= 4 * (512 * 512 + 512 * 2048) * 0.99
    assert cost.traffic[1] > 5 * cost.traffic[2]


def test_the_estimate_puts_schedules_in_the_order_that_everyone_knows() -> None:
    func = matmul(192, 256, 256)
    seconds = [
        extract(m, TARGET).seconds
        for m in (tiled(func, 6, 64), tiled(func, 6, 32), tiled(func, 1, 16), naive(func))
    ]
    assert seconds == sorted(seconds) and seconds[-1] > 10 * seconds[0]
    assert extract(tiled(func, 6, 64), TARGET).seconds > 2 * 192 * 256 * 256 / machine(TARGET).flops


def test_vectors_have_one_finite_number_for_each_name() -> None:
    for mod in (tiled(matmul()), naive(matmul()), naive(elementwise())):
        vector = extract(mod, TARGET).vector
        assert vector.shape == (len(FEATURES),) and vector.dtype == np.float32 and np.isfinite(vector).all()
    assert len(set(FEATURES)) == len(FEATURES)


def test_features_tell_schedules_apart_and_equal_ones_not() -> None:
    func = matmul()
    a, b, c = (extract(tiled(func, r), TARGET).vector for r in (2, 4, 4))
    assert (b == c).all() and (a != b).sum() > 8
    assert feature(tiled(func), "nest0.reduction") == 1 and feature(tiled(func), "total.nests") == 3
    assert feature(naive(elementwise()), "nest0.special") == 12


def test_threads_of_a_gpu_are_seen() -> None:
    target = tvm.target.Target({
        "kind": "cuda", "arch": "sm_90", "max_threads_per_block": 1024, "thread_warp_size": 32,
        "max_shared_memory_per_block": 232448,
    })  # fmt: skip

    def bound(threads: int, *, columns_last: bool = True) -> tvm.IRModule:
        sch = s_tir.Schedule(naive(elementwise()))
        i, j = sch.get_loops(sch.get_sblock("C"))
        if not columns_last:
            sch.reorder(j, i)
        block, thread = sch.split(sch.fuse(*((i, j) if columns_last else (j, i))), [None, threads])
        sch.bind(block, "blockIdx.x")
        sch.bind(thread, "threadIdx.x")
        return sch.mod

    _, cost = hottest(bound(256), target)
    assert (cost.threads, cost.parallel, cost.coalesced) == (256, 1024, 1.0)
    _, strided = hottest(bound(256, columns_last=False), target)
    assert strided.coalesced < 0.5 and strided.seconds > cost.seconds
    assert hottest(bound(32), target)[1].occupancy < cost.occupancy


@pytest.mark.alone
def test_reading_a_candidate_takes_milliseconds() -> None:
    mod, target = tiled(matmul()), str(TARGET)
    spent = []
    for _ in range(20):
        start = time.perf_counter()
        uncached.__wrapped__(mod, target, ())
        spent.append(time.perf_counter() - start)
    assert np.median(spent) < 0.005


def test_what_fits_a_cache_is_read_from_there_but_for_cold_weights() -> None:
    func = matmul(96, 256, 128)
    mod = tiled(func, 4, 16)
    warm, cold = (extract(mod, TARGET, c).seconds for c in ((), (1,)))
    level = machine(TARGET).levels[-1]
    assert cold - warm > 0.15 * 4 * 256 * 128 / level.refill / machine(TARGET).cores
    read = read_function(mod, (1,))
    chilled = [b.shape for b in read.arguments if b.cold]
    assert chilled == [tuple(int(n) for n in func.params[1].shape)]
    nest = max(read.nests, key=lambda n: n.flops)
    small, large = (nest_cost(nest, machine(TARGET), 0.0, resident) for resident in (1e3, 1e12))
    assert small.traffic == (small.cold,) * 3 and small.cold == 4 * 256 * 128 and max(large.traffic) > small.cold


def test_short_reductions_of_several_tiles_overlap() -> None:
    """A window of nine taps is over before its first sum is: the next tile's have begun by then."""
    short, long = (hottest(tiled(matmul(64, 64, k), 1, 16))[1] for k in (8, 512))
    assert short.reduced < long.reduced and short.overlap > long.overlap == 1.0


def test_a_ragged_tile_works_for_nothing_in_its_last_part() -> None:
    whole, ragged = hottest(tiled(matmul(48, 128, 96), 4, 32)), hottest(tiled(matmul(50, 128, 96), 4, 32))
    assert whole[1].useful == 1.0
    assert ragged[1].useful == pytest.approx(50 / 52) and ragged[0].iterations == 52 * 128 * 96


def test_conditions_are_seen_where_they_change() -> None:
    """Zeros around the columns change within a vector, zeros around the rows only from row to row."""
    def border(axis: int) -> tvm.IRModule:
        a = te.placeholder((32, 64), name="A")

        def value(i: tirx.Var, j: tirx.Var) -> tirx.Expr:
            place = (i, j)[axis]
            return tirx.if_then_else(place >= 1, a[i, j], 0.0)

        sch = s_tir.Schedule(naive(te.create_prim_func([a, te.compute((32, 64), value, name="C")])))
        _, j = sch.get_loops(sch.get_sblock("C"))
        _, j1 = sch.split(j, [None, 16])
        sch.vectorize(j1)
        return sch.mod

    assert [hottest(border(axis))[1].conditional for axis in (0, 1)] == [0.25, 1.0]
    assert hottest(border(0))[1].conditions == 1 and hottest(tiled(matmul()))[1].conditions == 0


def test_prefetches_are_seen() -> None:
    sch = s_tir.Schedule(naive(matmul()))
    plain = feature(sch.mod, "total.fetching")
    sch.annotate(sch.get_loops(sch.get_sblock("C"))[2], "mlc.prefetch", [1, 1, 1])
    assert (plain, feature(sch.mod, "total.fetching")) == (0.0, 1.0)


def test_what_each_core_touches() -> None:
    """Two cores that share the rows of a product both read all of B; rows of an elementwise function are apart."""
    _, cost = hottest(tiled(matmul(64, 128, 96), 4, 32))
    assert cost.share == 4 * (32 * 96 + 96 * 128)  # the accumulators are local
    assert cost.apart == pytest.approx((64 * 96 + 96 * 128) / (64 * 96 + 2 * 96 * 128))
    sch = s_tir.Schedule(naive(elementwise()))
    sch.parallel(sch.get_loops(sch.get_sblock("C"))[0])
    assert hottest(sch.mod)[1].apart == pytest.approx(1.0)


def test_larger_caches_are_refilled_less() -> None:
    curve = hottest(tiled(matmul(512, 2048, 512)))[1].curve
    assert len(curve) == len(SIZES) and list(curve) == sorted(curve, reverse=True) and curve[0] > 2 * curve[-1]
    assert curve[-1] >= 4 * (512 * 512 + 512 * 2048) * 0.99


def test_lines_a_page_apart_fall_on_one_set() -> None:
    def down(columns: int) -> NestCost:
        a = te.placeholder((64, columns), name="A")
        sch = s_tir.Schedule(naive(te.create_prim_func([a, te.compute((columns, 64), lambda i, j: a[j, i], name="C")])))
        _, j = sch.get_loops(sch.get_sblock("C"))
        _, j1 = sch.split(j, [None, 16])
        sch.vectorize(j1)
        return hottest(sch.mod)[1]

    assert (down(1024).aliased, down(1040).aliased) == (16, 0) and down(1024).streams >= 17


def test_unpacking_weights_is_a_mask_and_a_conversion() -> None:
    """Which of a word's rows a mask leaves is settled when they are unrolled: no time of any schedule."""
    x, words = te.placeholder((1, 256), name="x"), te.placeholder((4, 32, 32), "uint32", name="words")
    scale = te.placeholder((4, 8, 32), name="scale")
    func = te.create_prim_func([x, words, scale, dense_weight_only(x, words, scale, None, 4, 32)])
    placed, parts, totals, product = read_function(func).nests
    assert [nest.arithmetic for nest in (placed, parts, totals, product)] == [1, 5, 1, 4]
    assert roofline(func, TARGET).bytes == (256 + 4 * 32 * 32 + 4 * 8 * 32 + 128) * 4
