"""The emulator's instructions against the PTX ISA's own tables, and the costs that it counts against hand-made ones.

The tables are those of the section "Warp Level Matrix Instructions": for every thread and register, the row and the
column of the matrix that it holds. Nothing here uses the layouts of ``schedules.intrin``.
"""

from __future__ import annotations

import shutil

import ml_dtypes
import numpy as np
import pytest

from mlc.testing.cuda_asm import emulated
from mlc.testing.cuda_emulator import Cost, Launch, run_source

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator is compiled with g++")

RNG = np.random.default_rng(0)
WARP = [Launch((1, 1, 1), (32, 1, 1))]
HEAD = '#endif\nextern "C" __global__ void __launch_bounds__(32) '
SHARED = "extern __shared__ __align__(64) uchar buf[];\n"


def table_16x8x16(thread: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    group, inside = thread >> 2, thread % 4
    a = [(group + (0 if i < 2 or 4 <= i < 6 else 8), inside * 2 + (i & 1) + (8 if i >= 4 else 0)) for i in range(8)]
    b = [(inside * 2 + (i & 1) + (8 if i >= 2 else 0), group) for i in range(4)]
    return a, b


def table_16x8x32(thread: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    group, inside = thread >> 2, thread % 4
    a = [(group + (0 if i < 4 or 8 <= i < 12 else 8), inside * 4 + (i & 3) + (16 if i >= 8 else 0)) for i in range(16)]
    b = [(inside * 4 + (i & 3) + (16 if i >= 4 else 0), group) for i in range(8)]
    return a, b


def table_16x8x8(thread: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    group, inside = thread >> 2, thread % 4
    a = [(group + (8 if i in (1, 3) else 0), inside + (4 if i >= 2 else 0)) for i in range(4)]
    b = [(inside + (4 if i else 0), group) for i in range(2)]
    return a, b


def table_of_sums(thread: int) -> list[tuple[int, int]]:
    group, inside = thread >> 2, thread % 4
    return [(group + (8 if i >= 2 else 0), inside * 2 + (i & 1)) for i in range(4)]


KINDS = {
    "f16": ("half", "float", "f", "m16n8k16.row.col.f32.f16.f16.f32", np.float16, np.float32, table_16x8x16),
    "bf16": ("nv_bfloat16", "float", "f", "m16n8k16.row.col.f32.bf16.bf16.f32", ml_dtypes.bfloat16, np.float32,
             table_16x8x16),
    "s8": ("signed char", "int", "r", "m16n8k32.row.col.s32.s8.s8.s32", np.int8, np.int32, table_16x8x32),
    "tf32": ("float", "float", "f", "m16n8k8.row.col.f32.tf32.tf32.f32", np.float32, np.float32, table_16x8x8),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_has_the_fragments_of_the_isa(kind: str) -> None:
    element, result, letter, name, operand, total, table = KINDS[kind]
    held = [table(thread) for thread in range(32)]
    depth = 1 + max(column for a, _ in held for _, column in a)
    at_a, at_b = (np.array([[r * (depth, 8)[side] + c for r, c in t[side]] for t in held], "int32") for side in (0, 1))
    at_c = np.array([[r * 8 + c for r, c in table_of_sums(thread)] for thread in range(32)], "int32")
    assert sorted(at_a.ravel()) == list(range(16 * depth)) and sorted(at_c.ravel()) == list(range(128))
    a, b, c = (draw((16, depth), operand), draw((depth, 8), operand), draw((16, 8), total))
    if kind == "tf32":  # which has 10 bits of mantissa
        a, b = ((x.view("uint32") & np.uint32(0xFFFFE000)).view("float32") for x in (a, b))
    outputs = ", ".join(f'"={letter}"(d[{i}])' for i in range(4))
    inputs = ", ".join(
        [*(f'"r"(((unsigned*)x)[{i}])' for i in range(4)), *(f'"r"(((unsigned*)y)[{i}])' for i in range(2)),
         *(f'"{letter}"(z[{i}])' for i in range(4))])
    source = HEAD + f"""k({element}* __restrict__ a_ptr, {element}* __restrict__ b_ptr, {result}* __restrict__ c_ptr,
        int* __restrict__ at_a_ptr, int* __restrict__ at_b_ptr, int* __restrict__ at_c_ptr) {{
      alignas(16) {element} x[{at_a.shape[1]}], y[{at_b.shape[1]}];
      {result} z[4], d[4];
      for (int i = 0; i < {at_a.shape[1]}; ++i) x[i] = a_ptr[at_a_ptr[threadIdx.x * {at_a.shape[1]} + i]];
      for (int i = 0; i < {at_b.shape[1]}; ++i) y[i] = b_ptr[at_b_ptr[threadIdx.x * {at_b.shape[1]} + i]];
      for (int i = 0; i < 4; ++i) z[i] = c_ptr[at_c_ptr[threadIdx.x * 4 + i]];
      asm volatile("mma.sync.aligned.{name} {{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, {{%10, %11, %12, %13}};"
        : {outputs} : {inputs});
      for (int i = 0; i < 4; ++i) c_ptr[at_c_ptr[threadIdx.x * 4 + i]] = d[i];
    }}"""
    wide = "int64" if total is np.int32 else "float64"
    expected = c.astype(wide) + a.astype(wide) @ b.astype(wide)
    run_source(source, WARP, {"a": a, "b": b, "c": c, "at_a": at_a, "at_b": at_b, "at_c": at_c})
    np.testing.assert_allclose(c, expected, rtol=0 if total is np.int32 else 1e-6, atol=0 if kind == "s8" else 1e-6)


def test_rounding_to_tf32() -> None:
    """To nearest with ties away from zero, at 10 bits of mantissa; reckoned with whole numbers of the last place."""
    ties = np.float32(1) + np.float32(2.0**-11) * np.arange(32, dtype="float32")
    x = np.concatenate([RNG.standard_normal(256).astype("float32"), ties, -ties])
    x *= np.exp2(RNG.integers(-60, 60, 320)).astype("float32")
    x[:3] = np.inf, -np.inf, 0.0
    y = np.zeros_like(x)
    source = HEAD + """k(float* __restrict__ x_ptr, float* __restrict__ y_ptr) {
      for (int i = 0; i < 10; ++i) {
        unsigned bits;
        asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x_ptr[32 * i + threadIdx.x]));
        y_ptr[32 * i + threadIdx.x] = *(float*)&bits;
      }
    }"""
    run_source(source, WARP, {"x": x, "y": y})
    mantissa, exponent = np.frexp(np.abs(x[np.isfinite(x)]).astype("float64"))
    wanted = np.ldexp(np.floor(mantissa * 2048 + 0.5) / 2048, exponent)
    np.testing.assert_array_equal(np.abs(y[np.isfinite(x)]), wanted)
    np.testing.assert_array_equal(np.sign(y), np.sign(x))
    np.testing.assert_array_equal(y[~np.isfinite(x)], x[~np.isfinite(x)])


def draw(shape: tuple[int, int], dtype: type) -> np.ndarray:
    if np.issubdtype(dtype, np.integer):
        return RNG.integers(-128, 128, shape).astype(dtype)
    return RNG.standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_load_has_the_fragments_of_the_isa(transposed: bool) -> None:
    """Thread t names row t % 8 of matrix t / 8, and receives of each row t / 4, or of the transposed matrix's."""
    memory = RNG.integers(0, 1 << 16, (32, 8)).astype("uint16")
    rows = RNG.permutation(32)  # the rows of the four matrices lie anywhere
    got = np.zeros((32, 8), "uint16")
    trans = ".trans" if transposed else ""
    source = HEAD + f"""k(ushort* __restrict__ memory_ptr, int* __restrict__ rows_ptr, ushort* __restrict__ got_ptr) {{
      {SHARED}
      for (int i = 0; i < 8; ++i) ((ushort*)buf)[threadIdx.x * 8 + i] = memory_ptr[threadIdx.x * 8 + i];
      __syncthreads();
      alignas(16) ushort mine[8];
      unsigned addr = __cvta_generic_to_shared(buf + 16 * rows_ptr[threadIdx.x]);
      __asm__ __volatile__("ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16" "{{%0, %1, %2, %3}}, [%4];\\n"
        : "=r"(((unsigned*)mine)[0]), "=r"(((unsigned*)mine)[1]), "=r"(((unsigned*)mine)[2]), "=r"(((unsigned*)mine)[3])
        : "r"(addr));
      for (int i = 0; i < 8; ++i) got_ptr[threadIdx.x * 8 + i] = mine[i];
    }}"""
    run_source(source, WARP, {"memory": memory, "rows": rows.astype("int32"), "got": got})
    for thread in range(32):
        for register in range(4):
            matrix = memory[rows[8 * register : 8 * register + 8]]
            wanted = (matrix.T if transposed else matrix)[thread // 4, 2 * (thread % 4) :][:2]
            np.testing.assert_array_equal(got[thread, 2 * register :][:2], wanted)


def copies(first: str = "", between: str = "", wait: str = "cp.async.wait_group 0;") -> tuple[np.ndarray, np.ndarray]:
    """16 bytes a thread, by way of shared memory, where each thread reads what another has copied."""
    x, y = RNG.standard_normal((32, 4)).astype("float32"), np.zeros((32, 4), "float32")
    waits = f'asm volatile("{wait}" ::: "memory");' if wait else ""
    source = HEAD + f"""k(float* __restrict__ x_ptr, float* __restrict__ y_ptr) {{
      {SHARED}
      unsigned to = __cvta_generic_to_shared(buf + 16 * threadIdx.x);
      float* from = x_ptr + 4 * threadIdx.x;
      asm volatile("cp.async.cg.shared.global [%0], [%1], %2;" :: "r"(to), "l"(from), "n"(16));
      asm volatile("cp.async.commit_group;" ::);
      {first}
      {waits}
      {between}
      for (int i = 0; i < 4; ++i) y_ptr[4 * threadIdx.x + i] = ((float*)buf)[4 * (threadIdx.x ^ 17) + i];
      asm volatile("cp.async.wait_group 0;" ::: "memory");
    }}"""
    run_source(source, WARP, {"x": x, "y": y})
    return y, x[np.arange(32) ^ 17]


def test_copies_land_when_they_are_waited_for() -> None:
    got, expected = copies(between="__syncthreads();")
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("wrong", [
    {"between": "__syncthreads();", "wait": ""}, {"between": "__syncthreads();", "wait": "cp.async.wait_group 1;"}, {},
], ids=["no wait", "a wait for too few", "no barrier"])
def test_what_is_not_waited_for_is_poison(wrong: dict[str, str]) -> None:
    got, expected = copies(**wrong)
    assert np.isnan(got).any() and not np.array_equal(got, expected)


def test_a_wait_lets_the_latest_groups_go_on() -> None:
    """The second, empty group may be under way, the first may not."""
    empty = 'asm volatile("cp.async.commit_group;" ::);'
    got, expected = copies(empty, "__syncthreads();", "cp.async.wait_group 1;")
    np.testing.assert_array_equal(got, expected)


def test_a_copy_that_nobody_waits_for_and_an_unaligned_one_are_errors() -> None:
    body = 'asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" :: "r"({to}), "l"(x_ptr), "n"(4)); {end}'
    x = np.zeros(4, "float32")
    for to, end, reason in ((0, "", "must be waited for"), (2, 'asm volatile("cp.async.wait_all;");', "aligned")):
        source = HEAD + "k(float* __restrict__ x_ptr) {" + body.format(to=to, end=end) + "}"
        with pytest.raises(RuntimeError, match=reason):
            run_source(source, WARP, {"x": x})


def test_an_unknown_instruction_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"does not know 'fence\.proxy\.async;'"):
        emulated('asm volatile("fence.proxy.async;");')


def cost_of(address: str, vector: str = "float4") -> Cost:
    """Of one store of a vector to shared memory, ``address`` in bytes."""
    source = HEAD + f"k(float* __restrict__ x_ptr) {{ {SHARED} *({vector}*)(buf + ({address})) = {vector}{{}}; }}"
    (cost,) = run_source(source, WARP, {"x": np.zeros(1, "float32")})
    return cost


@pytest.mark.parametrize(("address", "vector", "taken", "least"), [
    ("16 * threadIdx.x", "float4", 4, 4),  # 512 bytes in a row
    ("80 * threadIdx.x", "float4", 4, 4),  # rows of 64 bytes, padded by 16
    ("64 * threadIdx.x", "float4", 16, 4),  # rows of 64 bytes: every other one begins in the same bank
    ("128 * threadIdx.x", "float4", 32, 4),
    ("0", "float4", 4, 4),  # one word for all
    ("8 * threadIdx.x", "float2", 2, 2),
    ("544 * (threadIdx.x / 4) + 8 * (threadIdx.x % 4)", "float2", 2, 2),  # rows of sums, 128 and 8 words
    ("512 * (threadIdx.x / 4) + 8 * (threadIdx.x % 4)", "float2", 8, 2),
])
def test_waves_of_shared_memory(address: str, vector: str, taken: int, least: int) -> None:
    cost = cost_of(address, vector)
    assert (cost.shared, cost.requests, cost.taken, cost.least) == (True, 1, taken, least)


@pytest.mark.parametrize(("index", "taken"), [("4 * threadIdx.x", 16), ("8 * threadIdx.x", 32)])
def test_sectors_of_global_memory(index: str, taken: int) -> None:
    source = HEAD + f"k(float* __restrict__ x_ptr) {{ *(float4*)(x_ptr + ({index})) = float4{{1, 2, 3, 4}}; }}"
    x = np.zeros(256, "float32")
    (cost,) = run_source(source, WARP, {"x": x})
    assert (cost.shared, cost.bytes, cost.requests, cost.taken, cost.least) == (False, 16, 1, taken, 16)
    assert x.sum() == 320


def test_arrays_of_another_kernel_are_its_own() -> None:
    """One kernel keeps in registers what bears the name of another's array in shared memory."""
    head = 'extern "C" __global__ void '
    source = emulated(f"""
{head}first(float* x_ptr) {{ float kept[2]; kept[0] = x_ptr[0]; x_ptr[0] = kept[0]; }}
{head}second(float* x_ptr) {{ float* kept = (float*)emulator::own_shared(8); kept[0] = x_ptr[0]; x_ptr[0] = kept[0]; }}
""")
    first, second = source.split(head)[1:]
    assert "note" not in first and second.count("ptx::note") == 2
