"""The emulator's instructions of Hopper against the PTX ISA's own figures, and what it finds where one is missing.

Figures of "Asynchronous Warpgroup Level Matrix Instructions" (the fragment D of ``m64nNk16``, the canonical layouts
with 128-byte swizzling) and of "Tensors" (swizzling modes). Nothing here uses the layouts of ``schedules``.
"""

from __future__ import annotations

import shutil
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hopper_ptx import EXPECT, HEAD, INIT, INIT_FENCE, RNG, SHARED, UNTIL, WARPGROUP, rows_of, swizzled

from mlc.testing.cuda_asm import emulated
from mlc.testing.cuda_emulator import Cost, TensorMap, run_source

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator is compiled with g++")

FENCE, COMMIT = (f'asm volatile("wgmma.{which}.sync.aligned;" ::: "memory");' for which in ("fence", "commit_group"))

WAIT = 'asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");'
TYPES = {"f16": ("half", np.float16), "bf16": ("nv_bfloat16", ml_dtypes.bfloat16)}


def along_k(matrix: np.ndarray) -> np.ndarray:
    """A K-major operand ``[row, k]`` of k up to 64, in one column of atoms of 8 rows."""
    return swizzled(np.pad(matrix, ((0, 0), (0, 64 - matrix.shape[1]))))


def across_k(matrix: np.ndarray) -> np.ndarray:
    """An MN-major operand: for each 64 rows, a row of these for each k."""
    return np.concatenate([swizzled(np.ascontiguousarray(part.T)) for part in np.split(matrix, len(matrix) // 64)])


def descriptor(at: str, leading: int, stride: int) -> str:
    """The figure "Matrix-descriptor layout": addresses and offsets without their last four bits, swizzling mode 1."""
    return f"((1ull << 62) | ({stride >> 4}ull << 32) | ({leading >> 4}ull << 16) | (uint64_t({at}) >> 4))"


def product(columns: int, kind: str, across: tuple[int, int], a: str, b: str, adds: int = 1) -> str:
    sums = ", ".join(f"%{i}" for i in range(columns // 2))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(columns // 2))
    first = columns // 2
    return (f'asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{first + 2}, 0;\\n'
            f'wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} {{{sums}}}, %{first}, %{first + 1}, p, '
            f'1, 1, {across[0]}, {across[1]};\\n}}\\n" : {outputs} : "l"({a}), "l"({b}), "r"({adds}));')


def multiply(
    columns: int = 64, kind: str = "f16", across: tuple[int, int] = (0, 0), adds: int = 1, *,
    fence: str = FENCE, between: str = "", commit: str = COMMIT, wait: str = WAIT, after: str = "",
) -> tuple[np.ndarray, np.ndarray, list[Cost]]:
    """``c + a b`` of 64 rows with k from 32 to 47 of 48: what the kernel gives, what is right, and its costs."""
    element, dtype = TYPES[kind]
    a, b = (RNG.standard_normal((rows, 48)).astype(dtype) for rows in (64, columns))
    c = RNG.standard_normal((64, columns)).astype("float32")
    wanted = c * adds + a[:, 32:].astype("float64") @ b[:, 32:].astype("float64").T
    images = [(across_k if turned else along_k)(x) for x, turned in zip((a, b), across, strict=True)]
    # 16 of k are 32 bytes of a row, or 16 rows of 128 bytes; 64 rows of an MN-major operand take 48 rows of bytes
    begin = [str(2048 * 2 if turned else 64) for turned in across]
    at = [descriptor(f"{address} + {offset}", 48 * 128, 1024)
          for address, offset in zip(("0", str(images[0].nbytes)), begin, strict=True)]
    source = HEAD + f"""k({element}* __restrict__ a_ptr, {element}* __restrict__ b_ptr, float* __restrict__ c_ptr) {{
      {SHARED}
      {element}* shared = ({element}*)buf;
      for (int i = threadIdx.x; i < {images[0].size}; i += 128) shared[i] = a_ptr[i];
      for (int i = threadIdx.x; i < {images[1].size}; i += 128) shared[{images[0].size} + i] = b_ptr[i];
      __syncthreads();
      float d[{columns // 2}];
      int row = 16 * (threadIdx.x / 32) + threadIdx.x % 32 / 4, column = 2 * (threadIdx.x % 4);
      for (int i = 0; i < {columns // 2}; ++i)
        d[i] = c_ptr[(row + i / 2 % 2 * 8) * {columns} + i / 4 * 8 + column + i % 2];
      {fence}
      {product(columns, kind, across, *at, adds)}
      {commit}
      {between}
      {wait}
      for (int i = 0; i < {columns // 2}; ++i)
        c_ptr[(row + i / 2 % 2 * 8) * {columns} + i / 4 * 8 + column + i % 2] = d[i];
      {after}
    }}"""
    costs = run_source(source, WARPGROUP, {"a": images[0], "b": images[1], "c": c})
    return c, wanted, costs


@pytest.mark.sampled(3)
@pytest.mark.parametrize("across", [(0, 0), (1, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize(("kind", "columns"), [("f16", 64), ("bf16", 192)])
def test_a_product_has_the_layouts_of_the_isa(kind: str, columns: int, across: tuple[int, int]) -> None:
    got, wanted, costs = multiply(columns, kind, across)
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-5)
    read = {cost.what: cost for cost in costs if cost.what.startswith("wgmma")}
    assert read.keys() == {"wgmma a", "wgmma b"}
    assert [cost.requests for cost in read.values()] == [64 // 8 * 2, columns // 8 * 2]
    assert all(cost.taken == cost.least for cost in read.values()), "swizzled pieces meet in no bank"


def multiply_registers(kind: str = "f16", across: int = 0, between: str = "") -> tuple[np.ndarray, np.ndarray]:
    """``a b`` of 64 rows in registers, as the figure "Register Fragments" of A for ``wgmma.m64nNk16`` has them, and of
    64 columns in memory."""
    element, dtype = TYPES[kind]
    a, b = (RNG.standard_normal((64, 16)).astype(dtype) for _ in range(2))
    image = (across_k if across else along_k)(b)
    places, sums = ", ".join(f"%{i}" for i in range(32, 36)), ", ".join(f"%{i}" for i in range(32))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(32))
    source = HEAD + f"""k({element}* __restrict__ a_ptr, {element}* __restrict__ b_ptr, float* __restrict__ c_ptr) {{
      {SHARED}
      {element}* shared = ({element}*)buf;
      for (int i = threadIdx.x; i < {image.size}; i += 128) shared[i] = b_ptr[i];
      __syncthreads();
      float d[32];
      {element} held[8];
      int row = 16 * (threadIdx.x / 32) + threadIdx.x % 32 / 4, column = 2 * (threadIdx.x % 4);
      for (int i = 0; i < 8; ++i) held[i] = a_ptr[(row + i / 2 % 2 * 8) * 16 + column + i % 2 + i / 4 * 8];
      unsigned* a = (unsigned*)held;
      {FENCE}
      asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %37, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.{kind}.{kind} {{{sums}}}, {{{places}}}, %36, p, 1, 1, {across};"
        "\\n}}\\n"
        : {outputs} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"({descriptor("0", 2048, 1024)}), "r"(0));
      {COMMIT}
      {between}
      {WAIT}
      for (int i = 0; i < 32; ++i) c_ptr[(row + i / 2 % 2 * 8) * 64 + i / 4 * 8 + column + i % 2] = d[i];
    }}"""
    c = np.zeros((64, 64), "float32")
    run_source(source, WARPGROUP, {"a": a, "b": image, "c": c})
    return c, a.astype("float64") @ b.astype("float64").T


@pytest.mark.sampled(4)
@pytest.mark.parametrize("across", [0, 1])
@pytest.mark.parametrize("kind", TYPES)
def test_a_product_of_registers_has_the_layout_of_the_isa(kind: str, across: int) -> None:
    got, wanted = multiply_registers(kind, across)
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-5)


def test_registers_are_read_until_the_product_is_waited_for() -> None:
    got, wanted = multiply_registers(between="if (threadIdx.x == 5) a[2] = 0;")
    wrong = np.abs(got - wanted) > 1e-5
    assert wrong[1].any() and not np.delete(wrong, 1, 0).any(), "k 10 and 11 of the row of threads 4 to 7"


def test_a_product_may_begin_a_sum() -> None:
    got, wanted, _ = multiply(adds=0)
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(("change", "reason"), [
    ({"fence": ""}, "must come after a fence"),
    ({"commit": ""}, "must be waited for"),
    ({"wait": "", "after": ""}, "must be waited for"),
])
def test_a_missing_step_of_a_product_is_an_error(change: dict[str, str], reason: str) -> None:
    with pytest.raises(RuntimeError, match=reason):
        multiply(**change)


def test_sums_are_poison_until_they_are_waited_for() -> None:
    got, _, _ = multiply(wait=WAIT.replace(" 0;", " 1;"), after=WAIT)
    assert np.isnan(got).all()


def test_operands_are_read_as_late_as_they_may_be() -> None:
    got, wanted, _ = multiply(between="__syncthreads(); for (int i = threadIdx.x; i < 8192; i += 128) buf[i] = 0;")
    assert np.abs(got - wanted).max() > 0.1


def fetched(tensor: TensorMap, x: np.ndarray, at: tuple[int, ...], **change: Any) -> np.ndarray:
    """The bytes of shared memory behind a copy of a box, of 8 KiB at most."""
    steps = tensor.steps or (1,) * len(tensor.box)
    size = int(np.prod([-(-box // step) for box, step in zip(tensor.box, steps, strict=True)])) * tensor.bytes
    parts = {"init": INIT, "fence": INIT_FENCE, "meet": "__syncthreads();", "bytes": size, "parity": 0, "wait": UNTIL,
             "before": "", "after": "", **change}
    operands = "".join(f', "r"({c})' for c in at)
    names = ", ".join(f"%{2 + i}" for i in range(len(at)))
    source = HEAD + f"""k(const __grid_constant__ CUtensorMap map, uchar* __restrict__ y_ptr) {{
      {SHARED}
      if (threadIdx.x == 0) {{ {parts["init"]} {parts["fence"]} }}
      {parts["meet"]}
      if (threadIdx.x == 0) {{
        {EXPECT.format(bytes=parts["bytes"])}
        asm volatile("cp.async.bulk.tensor.{len(at)}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
          "[%1, {{{names}}}], [%{2 + len(at)}];" :: "r"(1024u), "l"((unsigned long long)(&(map))){operands}, "r"(0u)
          : "memory");
      }}
      {parts["before"]}
      {parts["wait"].format(parity=parts["parity"])}
      for (int i = threadIdx.x; i < {size}; i += 128) y_ptr[i] = buf[1024 + i];
      {parts["after"]}
    }}"""
    y = np.zeros(size, "uint8")
    run_source(source, WARPGROUP, {"x": x, "y": y}, maps={"map": tensor})
    return y


@pytest.mark.sampled(2)
@pytest.mark.parametrize("at", [(0, 0), (8, 3), (72, 30), (-5, -7), (400, 0)], ids=str)
def test_a_box_is_swizzled_and_zero_outside(at: tuple[int, int]) -> None:
    x = RNG.integers(1, 1 << 16, (50, 104)).astype("uint16")
    around = np.pad(x, ((100, 100), (500, 500)))
    wanted = around[100 + at[1] :, 500 + at[0] :][:40, :64]
    np.testing.assert_array_equal(fetched(rows_of(x), x, at).view("uint16").reshape(40, 64), swizzled(wanted))


def test_a_box_of_three_dimensions_without_swizzling() -> None:
    x = RNG.integers(1, 1 << 16, (3, 20, 32)).astype("uint16")
    tensor = TensorMap("x", 2 * 8, 2, (24, 20, 3), (64, 1280), (8, 6, 2), swizzled=False)
    got = fetched(tensor, x, (4, 17, 2)).view("uint16").reshape(2, 6, 8)
    wanted = np.zeros((2, 6, 8), "uint16")
    wanted[0, :3] = x[2, 17:, 12:20]
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("steps", [(1, 1, 1, 1), (1, 2, 3, 1)], ids=str)
@pytest.mark.parametrize("at", [(16, -3, -2, 1), (48, 7, 5, -1)], ids=str)
def test_a_box_of_pixels_may_begin_before_an_image_and_take_every_second(
    steps: tuple[int, ...], at: tuple[int, ...],
) -> None:
    """"Traversal-Stride": a box as wide as it spans; from the first element on, inside of the tensor or not."""
    x = RNG.integers(1, 1 << 16, (2, 9, 11, 80)).astype("uint16")
    counts = (64, 4, 3, 2)
    box = tuple(count * step for count, step in zip(counts, steps, strict=True))
    tensor = TensorMap("x", 0, 2, (80, 11, 9, 2), (160, 1760, 15840), box, steps=steps)
    around = np.pad(x, ((9, 9), (20, 20), (20, 20), (0, 80)))
    c, w, h, n = at
    wanted = around[n + 9 : n + 11, h + 20 :: steps[2], w + 20 :: steps[1], c : c + 64][:, :3, :4]
    assert wanted.any() and not wanted.all()
    got = fetched(tensor, x, at).view("uint16").reshape(-1, 64)
    np.testing.assert_array_equal(got, swizzled(wanted.reshape(-1, 64)))


@pytest.mark.parametrize(("change", "reason"), [
    ({"box": (64, 257)}, "must span 1 to 256 elements"), ({"steps": (1, 9)}, "up to every eighth"),
    ({"steps": (2, 1)}, "of the innermost dimension every one"), ({"strides": (200,)}, "multiples of 16 bytes"),
], ids=str)
def test_what_no_tensor_map_may_say_is_an_error(change: dict[str, Any], reason: str) -> None:
    x = np.ones((300, 104), "uint16")
    with pytest.raises(RuntimeError, match=reason):
        fetched(rows_of(x)._replace(**change), x, (0, 0), bytes=16)


def test_a_box_that_is_not_waited_for_is_poison() -> None:
    x = np.ones((40, 64), "uint16")
    got = fetched(rows_of(x), x, (0, 0), wait="__syncthreads();", after=UNTIL.format(parity=0))
    assert (got == 0xFF).all()
    done = fetched(rows_of(x), x, (0, 0), parity=1, after=UNTIL.format(parity=0).replace("done", "again"))
    assert (done == 0xFF).all(), "the phase before the first has completed"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("change", "reason"), [
    ({"init": ""}, "must be initialised before it is used"),
    ({"fence": ""}, "must be fenced and its block meet"),
    ({"meet": ""}, "must be fenced and its block meet"),
    ({"bytes": 16}, "the others never reach"),
    ({"bytes": 1 << 14}, "the others never reach"),
    ({"wait": "__syncthreads();"}, "a copy must be waited for"),
    ({"before": 'asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(0u) : "memory");'},
     "more threads arrive at a barrier"),
])
def test_a_missing_step_of_a_copy_is_an_error(change: dict[str, Any], reason: str) -> None:
    x = np.ones((40, 64), "uint16")
    with pytest.raises(RuntimeError, match=reason):
        fetched(rows_of(x), x, (0, 0), **change)


def test_how_many_registers_a_thread_may_have_changes_nothing() -> None:
    assert emulated('asm volatile("setmaxnreg.dec.sync.aligned.u32 40;" ::);') == ";"
    with pytest.raises(ValueError, match="does not know"):
        emulated('asm volatile("wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 {%0}, %1, %2, p, 1, 1;" ::);')


#: a box at 1024, which every thread writes 16 bytes of a row of, and the first one copies to a tensor
STORE_FENCE = 'asm volatile("fence.proxy.async.shared::cta;" ::: "memory");'
STORE_COMMIT = 'asm volatile("cp.async.bulk.commit_group;" ::: "memory");'
STORE_WAIT = 'asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");'


def write_rows(rows: int, value: str = "x_ptr[i]") -> str:
    """Rows of 64 numbers of 16 bits, a warp eight rows of 32 at a time: thread t names row t % 8 of the matrix t / 8,
    and holds of each matrix row t / 4 from 2 (t % 4) on."""
    return f"""for (int at = threadIdx.x / 32; at < {rows // 8 * 2}; at += 4) {{
        int row = at / 2 * 8, column = at % 2 * 32, lane = threadIdx.x % 32;
        alignas(16) ushort held[8];
        for (int m = 0; m < 4; ++m)
          for (int e = 0; e < 2; ++e) {{
            int i = (row + lane / 4) * 64 + column + m * 8 + lane % 4 * 2 + e;
            held[2 * m + e] = {value};
          }}
        unsigned to = 1024 + (row + lane % 8) * 128 + ((column / 8 + lane / 8) ^ (lane % 8)) * 16;
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {{%1, %2, %3, %4}};" :: "r"(to),
          "r"(((unsigned*)held)[0]), "r"(((unsigned*)held)[1]), "r"(((unsigned*)held)[2]), "r"(((unsigned*)held)[3])
          : "memory");
      }}"""


def stored(
    x: np.ndarray, y: np.ndarray, tensor: TensorMap, at: tuple[int, ...], **change: str
) -> list[Cost]:
    """Copy a box of numbers to the tensor ``y``."""
    steps = {"fence": STORE_FENCE, "meet": "__syncthreads();", "commit": STORE_COMMIT, "wait": STORE_WAIT, "after": "",
             **change}
    names, operands = ", ".join(f"%{1 + i}" for i in range(len(at))), "".join(f', "r"({c})' for c in at)
    source = HEAD + f"""k(const __grid_constant__ CUtensorMap map, ushort* __restrict__ x_ptr) {{
      {SHARED}
      {write_rows(len(x))}
      {steps["fence"]}
      {steps["meet"]}
      if (threadIdx.x == 0) {{
        asm volatile("cp.async.bulk.tensor.{len(at)}d.global.shared::cta.tile.bulk_group [%0, {{{names}}}], "
          "[%{1 + len(at)}];" :: "l"((unsigned long long)(&(map))){operands}, "r"(1024u) : "memory");
        {steps["commit"]}
        {steps["wait"]}
      }}
      {steps["after"]}
    }}"""
    return run_source(source, WARPGROUP, {"x": x, "y": y}, maps={"map": tensor})


@pytest.mark.sampled(2)
@pytest.mark.parametrize("at", [(0, 0), (8, 3), (72, 30), (-8, -7), (400, 0)], ids=str)
def test_a_box_is_stored_as_far_as_it_is_in_the_tensor(at: tuple[int, int]) -> None:
    x, y = RNG.integers(1, 1 << 16, (40, 64)).astype("uint16"), np.zeros((50, 104), "uint16")
    around = np.zeros((250, 1104), "uint16")
    around[100 + at[1] :, 500 + at[0] :][:40, :64] = x
    costs = stored(x, y, TensorMap("y", 0, 2, (104, 50), (208,), (64, 40)), at)
    np.testing.assert_array_equal(y, around[100:150, 500:604])
    (cost,) = (cost for cost in costs if cost.what == "stmatrix")
    assert (cost.requests, cost.taken, cost.least) == (10, 40, 40)


def test_a_box_of_three_dimensions_is_stored() -> None:
    x, y = RNG.integers(1, 1 << 16, (16, 64)).astype("uint16"), np.zeros((3, 20, 72), "uint16")
    stored(x, y, TensorMap("y", 0, 2, (72, 20, 3), (144, 2880), (64, 16, 1)), (8, 10, 2))
    wanted = np.zeros_like(y)
    wanted[2, 10:, 8:] = x[:10]
    np.testing.assert_array_equal(y, wanted)


@pytest.mark.parametrize("change", [
    {"fence": ""}, {"meet": ""},
    {"wait": "", "after": f"__syncthreads(); {write_rows(40, '0')} if (threadIdx.x == 0) {{ {STORE_WAIT} }}"},
    {"after": write_rows(40, "0")},
], ids=["no fence", "no barrier", "written again", "written again by others"])
def test_what_a_store_may_read_too_early_or_too_late_is_poison(change: dict[str, str]) -> None:
    """The threads that wait for nothing are ahead of the one that waits until the box is read."""
    x, y = RNG.integers(1, 1 << 15, (40, 64)).astype("uint16"), np.zeros((40, 64), "uint16")
    stored(x, y, rows_of_stored(y), (0, 0), **change)
    got, wanted = y.view("uint8"), x.view("uint8")
    assert (y == 0xFFFF).any() and ((got == wanted) | (got == 0xFF)).all()


def rows_of_stored(y: np.ndarray) -> TensorMap:
    return TensorMap("y", 0, 2, (y.shape[1], y.shape[0]), (2 * y.shape[1],), (64, 40))


@pytest.mark.parametrize("change", [{"commit": ""}, {"wait": ""}, {"wait": STORE_WAIT.replace(" 0;", " 1;")}])
def test_a_store_that_is_not_waited_for_is_an_error(change: dict[str, str]) -> None:
    x, y = np.ones((40, 64), "uint16"), np.zeros((40, 64), "uint16")
    with pytest.raises(RuntimeError, match="a store must be waited for"):
        stored(x, y, rows_of_stored(y), (0, 0), **change)
