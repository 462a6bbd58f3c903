"""What targets describe, and that seeds, estimates and rooflines go by it."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tvm
from tvm import te, tirx, topi

from cost_model.features import extract
from cost_model.machine import machine
from cost_model.roofline import analyse, estimate, prior
from mlc.graph.kernels.blocked import conv2d_nchwc
from mlc.target import resolve
from mlc.testing.cuda_cases import product_case
from schedules import registry
from schedules.cpu.common import parallel_work
from schedules.cuda.common import limits
from schedules.machine import FACTS, GPUS, CpuMachine, cpu_machine, gpu_machine, reference_machine
from schedules.space import first_seed


def described(mcpu: str, model: str = "", cores: int = 2, mattr: tuple[str, ...] = (), triple: str = "") -> CpuMachine:
    return cpu_machine(target(mcpu, model, cores, mattr, triple))


def target(
    mcpu: str, model: str = "", cores: int = 2, mattr: tuple[str, ...] = (), triple: str = ""
) -> tvm.target.Target:
    attrs = {"kind": "llvm", "mcpu": mcpu, "num-cores": cores, "model": model, "mattr": list(mattr), "mtriple": triple}
    return tvm.target.Target({key: value for key, value in attrs.items() if value})


def product(m: int, n: int, k: int) -> tirx.PrimFunc:
    a, b = te.placeholder((m, k), name="a"), te.placeholder((k, n), name="b")
    return te.create_prim_func([a, b, topi.matmul(a, b)])


def doubled(elements: int) -> tirx.PrimFunc:
    x = te.placeholder((elements,), name="x")
    return te.create_prim_func([x, te.compute(x.shape, lambda i: x[i] * 2.0, name="y")])


def decisions(func: tirx.PrimFunc, on: tvm.target.Target) -> dict[str, int]:
    return first_seed(registry.find(func, on), func, on)[1]


@pytest.mark.parametrize(
    ("mcpu", "hidden", "vectors", "fma", "dot", "l1", "l2"),
    [
        ("x86-64", "", (16, 16), 1, 0, 32, 32),
        ("x86-64-v3", "", (32, 16), 2, 0, 64, 64),
        ("x86-64-v4", "", (64, 32), 2, 0, 128, 64),
        ("znver1", "", (32, 16), 1, 0, 32, 32),
        ("znver3", "", (32, 16), 2, 0, 64, 32),
        ("znver4", "", (64, 32), 1, 1, 64, 32),
        ("znver4", "-avx512f", (32, 16), 2, 0, 64, 32),
        ("znver5", "", (64, 32), 2, 2, 128, 64),
        ("cascadelake", "-avx512vnni", (64, 32), 2, 0, 128, 64),
        ("sapphirerapids", "", (64, 32), 2, 2, 128, 64),
        ("tigerlake", "", (64, 32), 1, 1, 128, 64),
        ("alderlake", "", (32, 16), 2, 2, 64, 64),
        ("haswell", "-fma", (32, 16), 1, 0, 64, 64),
        ("neoverse-n1", "", (16, 32), 2, 2, 32, 32),
    ],
)
def test_units_follow_features_and_family(
    mcpu: str, hidden: str, vectors: tuple[int, int], fma: float, dot: float, l1: float, l2: float
) -> None:
    triple = "aarch64-linux-gnu" if mcpu.startswith("neoverse") else "x86_64-linux-gnu"
    on = described(mcpu, mattr=tuple(filter(None, [hidden])), triple=triple)
    assert (on.vector_bytes, on.vector_registers) == vectors
    assert (on.fma_per_cycle, on.dot_per_cycle, on.l1_rate, on.l2_rate) == (fma, dot, l1, l2)
    assert on.macs_per_cycle() == fma * on.vector_bytes / 4
    assert on.macs_per_cycle("int8") == (dot * on.vector_bytes or on.macs_per_cycle())
    assert on.flops == 2 * on.cores * on.hz * on.macs_per_cycle()


def test_one_unit_multiplies_words_on_the_first_zens() -> None:
    """A description says so by the CPU's name, and calibration the opposite where it has measured that."""
    rates = {name: machine(target(name)).dot for name in ("znver1", "znver2", "znver3", "haswell", "x86-64-v3")}
    assert rates == pytest.approx({"znver1": 1.0, "znver2": 1.0, "znver3": 1.6, "haswell": 1.6, "x86-64-v3": 1.6})
    assert machine(target("znver2", "words=2.0")).dot == machine(target("znver3", "fma=1,words=1")).dot == 1.6
    assert machine(target("haswell", "words=1.0")).dot == pytest.approx(1.0)
    assert machine(target("znver4", "words=1.0")).dot == 4.0, "dot products of bytes are better"


def test_every_measured_fact_replaces_what_is_described() -> None:
    text = ",".join(f"{name}={3 + i}.5" for i, name in enumerate(FACTS))
    found = described("znver4", f"l2=2M,{text},other=words")
    for i, fact in enumerate(FACTS.values()):
        expected = (3.5 + i) * fact.scale
        if fact.field == "memory_rate":
            expected = min(expected, found.cores * found.core_rate)
        assert getattr(found, fact.field) == pytest.approx(expected), fact
    assert found.l2_bytes == 2 << 20 and found.l1_bytes == described("znver4").l1_bytes


@pytest.mark.parametrize("text", ["ghz=", "ghz=fast", "xghz=3", "ghz=3GHz", "ghz=0", "fma=1.2.3", "GHZ=3"])
def test_what_is_no_figure_is_left_alone(text: str) -> None:
    assert described("znver4", text) == described("znver4")


def test_fewer_cores_than_were_measured_draw_less_from_memory() -> None:
    measured = "core=20,memory=90"
    rates = [described("znver4", measured, cores).memory_rate for cores in (1, 2, 8)]
    assert rates == pytest.approx([20e9, 40e9, 90e9])


def test_learned_models_see_what_the_instructions_say_and_estimates_the_machine() -> None:
    plain, measured = target("x86-64-v4"), target("x86-64-v4", "l1=48K,l2=2M,ghz=3,fma=1,l2rate=20,launch=9")
    assert reference_machine(plain) == reference_machine(measured) == cpu_machine(plain) != cpu_machine(measured)
    func = product(256, 256, 256)
    candidate = first_seed(registry.find(func, plain), func, plain)[0].mod
    assert np.array_equal(extract(candidate, plain).vector, extract(candidate, measured).vector)
    assert prior(candidate, measured) > 1.5 * prior(candidate, plain)


# -- a changed field changes what is decided


def test_arithmetic_and_memory_bounds_follow_their_rates() -> None:
    func, plain = product(512, 512, 512), target("x86-64-v4")
    for text in ("fma=1", "ghz=2.1"):
        slower = target("x86-64-v4", text)
        assert analyse(func, slower).compute_seconds == pytest.approx(2 * analyse(func, plain).compute_seconds)
    large, starved = doubled(32 << 20), target("x86-64-v4", "core=15,memory=30")
    assert estimate(large, starved) == pytest.approx(2 * estimate(large, plain))
    # what a larger last level holds does not come from memory
    assert estimate(doubled(3 << 20), target("x86-64-v4", "l3=64M")) < estimate(doubled(3 << 20), plain)


def test_work_is_shared_where_it_pays_for_the_start() -> None:
    func = doubled(80_000)
    assert decisions(func, target("x86-64-v4"))["parallel"] == 1
    assert decisions(func, target("x86-64-v4", "launch=8"))["parallel"] == 0
    costs = [parallel_work(described("x86-64-v4", f"launch={us}")) for us in (1, 2, 4)]
    assert costs[1] == pytest.approx(2 * costs[0], rel=1e-3) and costs[2] == pytest.approx(2 * costs[1], rel=1e-3)
    small = product(48, 64, 48)
    chunks = [_chunks(small, target("x86-64-v4", f"launch={us}")) for us in ("0.1", "50")]
    assert chunks[0] > chunks[1] == 1


def _chunks(func: tirx.PrimFunc, on: tvm.target.Target) -> int:
    seed, (m, n) = decisions(func, on), (int(extent) for extent in func.params[2].shape)
    return -(-m // (seed["m"] * seed["mb"])) * -(-n // (seed["n"] * seed["nb"]))


def test_tiles_load_less_where_loads_are_slower() -> None:
    """A tile of m rows and v vectors loads (m + v) / (m v) values for each multiply-add."""
    def loads(text: str) -> float:
        seed = decisions(product(256, 256, 256), target("x86-64-v4", text))
        m, v = seed["m"], seed["n"] // 16
        return (m + v) / (m * v)

    assert loads("l1rate=40") <= loads("l1rate=128") <= loads("l1rate=400,fma=1")
    assert loads("l1rate=40") < loads("l1rate=400,fma=0.5")


def test_convolutions_share_weights_among_more_pixels_where_the_second_level_is_slower() -> None:
    func = _blocked_convolution()
    pixels = [seed["ow"] * seed["oh"] for seed in (
        decisions(func, target("x86-64-v4", f"l2rate={rate}")) for rate in (24, 64, 200))]
    assert pixels[0] >= pixels[1] >= pixels[2] and pixels[0] > pixels[2]


def _blocked_convolution() -> tirx.PrimFunc:
    data, weight = te.placeholder((1, 16, 14, 14, 16), name="x"), te.placeholder((16, 16, 3, 3, 16, 16), name="w")
    return te.create_prim_func([data, weight, conv2d_nchwc(data, weight, (1, 1), (1, 1, 1, 1), (1, 1), 1)])


# -- GPUs


@pytest.mark.parametrize("number", [*GPUS, "90a"])
def test_a_gpu_is_what_its_data_sheet_says(number: str) -> None:
    on, sheet = resolve(f"cuda:sm_{number}").tvm, GPUS[number.removesuffix("a")]
    assert gpu_machine(on) == sheet
    attrs = json.loads(resolve(f"cuda:sm_{number}").attrs)
    assert attrs["max_shared_memory_per_block"] == sheet.shared_bytes
    assert limits(on).multiprocessors == sheet.multiprocessors and limits(on).shared_bytes <= sheet.shared_bytes
    assert machine(on).flops == sheet.flops and machine(on).bandwidth == sheet.memory_rate


def test_a_targets_own_limits_go_before_the_data_sheet() -> None:
    on = resolve("cuda:sm_90 -max_shared_memory_per_block=65536 -max_threads_per_block=256").tvm
    assert (gpu_machine(on).shared_bytes, gpu_machine(on).threads_per_block) == (65536, 256)
    assert gpu_machine(on).multiprocessors == GPUS["90"].multiprocessors


@pytest.mark.parametrize(("dtype", "total", "bits"), [("float16", "float32", 16), ("int8", "int32", 8)])
def test_tensor_cores_bound_products_of_short_numbers(dtype: str, total: str, bits: int) -> None:
    short = product_case("short", (512, 256), (256, 1024), dtype, total).func()
    on = gpu_machine(resolve("cuda:sm_90").tvm)
    work = 2 * 512 * 1024 * 256
    assert analyse(short, resolve("cuda:sm_90").tvm).compute_seconds == pytest.approx(work / on.tensor_flops(bits))
    plain = analyse(product(512, 1024, 256), resolve("cuda:sm_90").tvm)
    assert plain.compute_seconds == pytest.approx(plain.flops / on.flops)


def test_a_grid_fills_the_multiprocessors_that_there_are() -> None:
    func = product(512, 512, 4096)
    parts = [decisions(func, resolve(f"cuda:sm_{number}").tvm)["split_k"] for number in ("87", "90")]
    assert parts[0] < parts[1]
