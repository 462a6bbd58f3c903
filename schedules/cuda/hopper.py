"""Instructions of Hopper (``sm_90a``) as statements of a kernel that is written out: barriers in shared memory, copies
of boxes of tensors that complete them (TMA), and products of warpgroups (``wgmma``).

Addresses are bytes of shared memory, as 32-bit numbers. After the PTX ISA, "mbarrier", "Tensors" and "Asynchronous
Warpgroup Level Matrix Instructions".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import tirx

from schedules.cuda.emit import i64

__all__ = [
    "MOST_SPAN", "MOST_STEP", "PATTERN_BYTES", "SWIZZLE_BYTES", "WARPGROUP", "aligned_base", "arrive", "arrive_at",
    "available", "commit_products", "commit_stores", "encode", "expect", "fence_barriers", "fence_copies", "fence_sums",
    "fetch_box", "give_turn", "init_barrier", "limit_registers", "meet_cluster", "meet_warp", "multiply",
    "multiply_registers", "settle_first", "store_box", "store_matrices", "take_turn", "tensor_map", "wait_barrier",
    "wait_products", "wait_stores", "wait_sums",
]

WARPGROUP = 128
#: bytes of a row that is swizzled, in which a box is at most so wide; rows after which the pattern repeats, and their
#: bytes, at a multiple of which a tile must begin
SWIZZLE_BYTES = 128
PATTERN_BYTES = 8 * SWIZZLE_BYTES
#: elements that a box spans at most in a dimension, and how many it goes on by from one that it takes to the next
MOST_SPAN, MOST_STEP = 256, 8
#: of ``CUtensorMapSwizzle`` and ``CUtensorMapL2promotion``, 128 bytes each
_SWIZZLE, _PROMOTION = 3, 2
_KINDS = {"float16": "f16", "bfloat16": "bf16"}
#: registers of a thread that hold 64 rows of 16 of ``k``, two neighbours each
_PAIRS = 4


def available(target: tvm.target.Target) -> bool:
    """Whether a ``cuda`` target has these instructions, which later GPUs do not."""
    return all(arch == "sm_90a" for arch in str(target.attrs["arch"]).split(","))


def _call(name: str, parameters: str, body: str, *arguments: Any) -> tirx.Stmt:
    """A call of a function with this body for its effect."""
    from tvm.backend.cuda.op import cuda_func_call

    source = f"\n__forceinline__ __device__ void {name}({parameters}) {{\n  {body}\n}}\n"
    return tirx.Evaluate(cuda_func_call(name, *arguments, source_code=source))


def aligned_base(memory: tirx.Buffer) -> Any:
    """The address of the first byte of ``memory`` where a swizzled tile may begin: the code generator aligns shared
    memory to 64 bytes."""
    from tvm.backend.cuda.op import cuda_func_call

    source = (f"\n__forceinline__ __device__ int mlc_aligned_base(void* memory) {{\n"
              f"  return ((int)__cvta_generic_to_shared(memory) + {PATTERN_BYTES - 1}) & ~{PATTERN_BYTES - 1};\n}}\n")
    return cuda_func_call("mlc_aligned_base", memory.access_ptr("rw"), source_code=source, return_type="int32")


# barriers, each 8 bytes


def init_barrier(address: Any, count: int) -> tirx.Stmt:
    """Make a barrier whose phases complete with so many arrivals, and the bytes that are expected."""
    body = 'asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(address), "r"(count) : "memory");'
    return _call("mlc_init_barrier", "int address, int count", body, address, count)


def fence_barriers() -> tirx.Stmt:
    """Let copies see the barriers that this thread has made; other threads do when the block has met."""
    return _call("mlc_fence_barriers", "", 'asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");')


def arrive(address: Any) -> tirx.Stmt:
    """Count this thread."""
    body = 'asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(address) : "memory");'
    return _call("mlc_arrive", "int address", body, address)


def expect(address: Any, count: int) -> tirx.Stmt:
    """Count this thread, and so many bytes that the phase waits for."""
    body = ('asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(address), "r"(bytes) : '
            '"memory");')
    return _call("mlc_expect", "int address, int bytes", body, address, count)


def arrive_at(address: Any, rank: Any) -> tirx.Stmt:
    """Count this thread at the barrier at this address of the cluster's block of this number.

    It says that the thread's products have read a stage, which copies may then overwrite; what the thread wrote is not
    made visible there. ``.release.cluster`` would do that with a fence of the whole GPU at each step, which took half
    of a product's time on an H200.
    """
    body = """asm volatile("{\\n.reg .b32 there;\\nmapa.shared::cluster.u32 there, %0, %1;\\n"
               "mbarrier.arrive.shared::cluster.b64 _, [there];\\n}\\n"
               :: "r"(address), "r"(rank) : "memory");"""
    return _call("mlc_arrive_at", "int address, int rank", body, address, rank)


def wait_barrier(address: Any, parity: Any) -> tirx.Stmt:
    """Until the phase of this parity has completed; of a new barrier, that of parity 1 has."""
    body = """int done;
  do {
    asm volatile("{\\n.reg .pred p;\\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\\n"
                 "selp.b32 %0, 1, 0, p;\\n}\\n" : "=r"(done) : "r"(address), "r"(parity) : "memory");
  } while (!done);"""
    return _call("mlc_wait_barrier", "int address, int parity", body, address, parity)


def give_turn(number: Any, threads: int) -> tirx.Stmt:
    """Count this thread at the block's barrier of this number, 1 to 15, whose phases complete with so many ``threads``
    of whole warps, these and those that wait."""
    body = f'asm volatile("bar.arrive %0, {threads};" :: "r"(number) : "memory");'
    return _call(f"mlc_give_turn_{threads}", "int number", body, number)


def take_turn(number: Any, threads: int) -> tirx.Stmt:
    """Count this thread at the block's barrier of this number, and wait until so many have come in all
    (:func:`give_turn`)."""
    body = f'asm volatile("bar.sync %0, {threads};" :: "r"(number) : "memory");'
    return _call(f"mlc_take_turn_{threads}", "int number", body, number)


def meet_cluster(blocks: int) -> tirx.Stmt:
    """Until all threads of the cluster of so many blocks are here; it makes the kernel one of clusters."""
    body = 'asm volatile("barrier.cluster.arrive.release;\\nbarrier.cluster.wait.acquire;" ::: "memory");'
    return _call(f"mlc_meet_cluster_{blocks}", "", body)


# copies of boxes


def tensor_map(name: str) -> tirx.Var:
    """A kernel's parameter that says how a tensor lies in memory."""
    return tirx.Var(name, tvm.ir.PointerType(tirx.type.TensorMapType()))


def encode(
    var: tirx.Var, data: Any, dtype: str, sizes: Sequence[Any], strides: Sequence[int], box: Sequence[int],
    steps: Sequence[int] = (),
) -> list[tirx.Stmt]:
    """What the host does before the kernel: say how the tensor at ``data`` lies. Sizes and boxes are in elements,
    innermost first; strides in bytes, without the innermost's, multiples of 16. A box takes every ``steps``-th element,
    of one as many times as wide, at most :data:`MOST_STEP`. Boxes are swizzled by 128 bytes and zero outside of the
    tensor."""
    steps = steps or [1] * len(box)
    wide = [extent * step for extent, step in zip(box, steps, strict=True)]
    some = [n if isinstance(n, int) else tirx.max(i64(n), i64(1)) for n in sizes]  # there is no tensor without rows
    numbers = [n if isinstance(n, tirx.Expr) else i64(n) for n in (*some, *strides, *wide, *steps)]
    encoded = tirx.op.tensormap_encode_tiled(
        var, data, *numbers, descriptor_dtype=dtype, rank=len(sizes), swizzle=_SWIZZLE, l2_promotion=_PROMOTION)
    return [tirx.Bind(var, tirx.op.tvm_stack_alloca("tensormap", 1)), tirx.Evaluate(encoded)]


def fetch_box(to: Any, tensor: tirx.Var, at: Sequence[Any], barrier: Any, blocks: int = 1) -> tirx.Stmt:
    """Begin to copy the box at these coordinates, innermost first; its bytes count at ``barrier``. Of several
    ``blocks``, a whole cluster, each has it at the same place, and its bytes at the same barrier."""
    rank = len(at)
    names = [f"c{d}" for d in range(rank)]
    places, operands = ", ".join(f"%{d + 2}" for d in range(rank)), ", ".join(f'"r"({n})' for n in names)
    all_of, mask = (".multicast::cluster", f", %{rank + 3}") if blocks > 1 else ("", "")
    bits = f', "h"((unsigned short){(1 << blocks) - 1})' if blocks > 1 else ""
    body = (f'asm volatile("cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes'
            f'{all_of} "\n'
            f'               "[%0], [%1, {{{places}}}], [%{rank + 2}]{mask};"\n'
            f'               :: "r"(to), "l"(tensor), {operands}, "r"(barrier){bits} : "memory");')
    parameters = f"int to, unsigned long long tensor, {', '.join(f'int {n}' for n in names)}, int barrier"
    name = f"mlc_fetch_box_{rank}d" + (f"_of_{blocks}" if blocks > 1 else "")
    return _call(name, parameters, body, to, tirx.address_of(tensor), *at, barrier)


def store_box(tensor: tirx.Var, at: Sequence[Any], source: Any) -> tirx.Stmt:
    """Begin to copy the box at an address to these coordinates, innermost first, as far as they are in the tensor; in
    the open group of the thread's copies to tensors."""
    rank = len(at)
    names = [f"c{d}" for d in range(rank)]
    places, operands = ", ".join(f"%{d + 1}" for d in range(rank)), ", ".join(f'"r"({n})' for n in names)
    body = (f'asm volatile("cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group "\n'
            f'               "[%0, {{{places}}}], [%{rank + 1}];"\n'
            f'               :: "l"(tensor), {operands}, "r"(from) : "memory");')
    parameters = f"unsigned long long tensor, {', '.join(f'int {n}' for n in names)}, int from"
    return _call(f"mlc_store_box_{rank}d", parameters, body, tirx.address_of(tensor), *at, source)


def commit_stores() -> tirx.Stmt:
    """Make a group of the thread's copies to tensors so far."""
    return _call("mlc_commit_stores", "", 'asm volatile("cp.async.bulk.commit_group;" ::: "memory");')


def wait_stores(pending: int) -> tirx.Stmt:
    """Until at most so many of the thread's groups of copies to tensors still read shared memory."""
    body = f'asm volatile("cp.async.bulk.wait_group.read {pending};" ::: "memory");'
    return _call(f"mlc_wait_stores_{pending}", "", body)


def fence_copies() -> tirx.Stmt:
    """Let copies see what this thread has written to shared memory."""
    return _call("mlc_fence_copies", "", 'asm volatile("fence.proxy.async.shared::cta;" ::: "memory");')


def store_matrices(to: Any, held: tirx.Buffer) -> tirx.Stmt:
    """Write a warp's four matrices of 8 by 8 numbers of 16 bits, of which a thread holds two neighbours each, to shared
    memory: lanes from 0, 8, 16 and 24 on say where the rows of each are."""
    numbers = ", ".join(f'"r"(words[{i}])' for i in range(4))
    body = ('unsigned* words = (unsigned*)held;\n  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], '
            f'{{%1, %2, %3, %4}};" :: "r"(to), {numbers} : "memory");')
    return _call("mlc_store_matrices", "int to, void* held", body, to, held.access_ptr("r"))


def meet_warp() -> tirx.Stmt:
    """Until all threads of the warp are here."""
    return _call("mlc_meet_warp", "", "__syncwarp();")


# products of warpgroups


def limit_registers(count: int, *, more: bool) -> tirx.Stmt:
    """Give up registers of the warpgroup's threads until each has ``count``, or wait for ``more`` until it has."""
    how = "inc" if more else "dec"
    return _call(f"mlc_registers_{how}_{count}", "", f'asm volatile("setmaxnreg.{how}.sync.aligned.u32 {count};");')


def fence_sums() -> tirx.Stmt:
    """Let products see what threads did to the registers of sums."""
    return _call("mlc_fence_sums", "", 'asm volatile("wgmma.fence.sync.aligned;" ::: "memory");')


def commit_products() -> tirx.Stmt:
    """Make a group of the products so far."""
    return _call("mlc_commit_products", "", 'asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");')


def wait_products(pending: int) -> tirx.Stmt:
    """Until at most so many groups are under way."""
    body = f'asm volatile("wgmma.wait_group.sync.aligned {pending};" ::: "memory");'
    return _call(f"mlc_wait_products_{pending}", "", body)


def wait_sums(pending: int, sums: tirx.Buffer) -> tirx.Stmt:
    """:func:`wait_products`, of whose products these are the sums: the compiler must not read them before."""
    count = int(sums.shape[0])
    held = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    body = f'asm volatile("wgmma.wait_group.sync.aligned {pending};" : {held} :: "memory");'
    return _call(f"mlc_wait_sums_{pending}_{count}", "float* d", body, sums.access_ptr("rw", extent=count))


def settle_first(number: Any, address: Any) -> tirx.Stmt:
    """Have a ``number`` that is not negative before the products that are waited for next.

    ptxas (13.0) knows nothing of what a wait takes, and moves what was written to be computed while products are under
    way behind it: all exponentials of an attention's scores. It moves none across a store, here of what never is: a
    negative number, to shared memory.
    """
    body = """asm volatile("{\\n.reg .pred p;\\nsetp.lt.f32 p, %0, 0f00000000;\\n@p st.shared.f32 [%1], %0;\\n}\\n"
               :: "f"(number), "r"(address) : "memory");"""
    return _call("mlc_settle_first", "float number, int address", body, number, address)


def _descriptor(name: str, leading: int) -> str:
    """A swizzled matrix at the address ``name``: 8 rows, or of a matrix that runs across ``k`` 8 of ``k``, take
    :data:`PATTERN_BYTES`, and the next 64 elements of a row of the latter begin ``leading`` bytes further."""
    constant = 1 << 62 | PATTERN_BYTES >> 4 << 32 | leading >> 4 << 16
    return f"unsigned long long of_{name} = {constant:#x}ull | (({name} & 0x3ffff) >> 4);"


def multiply(
    sums: tirx.Buffer, at: Any, columns: int, dtype: str, a: Any, b: Any, leading: tuple[int, int], adds: Any
) -> tirx.Stmt:
    """Begin to multiply 64 rows at the address ``a`` and ``columns`` at ``b``, 16 of ``k``, into ``columns / 2`` sums
    of each thread from ``at`` on, of which it forgets the old values unless it ``adds``. Operands whose ``leading`` is
    0 run along ``k``, others across it (:func:`_descriptor`)."""
    kind = _KINDS[dtype]
    count = columns // 2
    places = ", ".join(f"%{i}" for i in range(count))
    across = ", ".join(str(int(each > 0)) for each in leading)
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    name = f"mlc_multiply_{kind}_{columns}_{leading[0]}_{leading[1]}"
    body = f"""{_descriptor("a", leading[0])}
  {_descriptor("b", leading[1])}
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n"
    "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} {{{places}}}, "
    "%{count}, %{count + 1}, p, 1, 1, {across};\\n}}\\n"
    : {outputs} : "l"(of_a), "l"(of_b), "r"(adds));"""
    pointer = sums.access_ptr("rw", offset=at, extent=count)
    return _call(name, "float* d, int a, int b, int adds", body, pointer, a, b, adds)


def multiply_registers(
    sums: tirx.Buffer, columns: int, a: tirx.Buffer, at: Any, b: Any, leading: int, adds: Any
) -> tirx.Stmt:
    """:func:`multiply` whose 64 rows are in registers, eight elements of each thread from ``at`` on: two neighbours of
    a row, of the row 8 further, and the same of ``k`` 8 further."""
    dtype = str(a.dtype)
    kind = _KINDS[dtype]
    count = columns // 2
    places = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    pairs = ", ".join(f"%{count + i}" for i in range(_PAIRS))
    inputs = ", ".join(f'"r"(a[{i}])' for i in range(_PAIRS))
    name = f"mlc_multiply_registers_{kind}_{columns}_{leading}"
    body = f"""{_descriptor("b", leading)}
  unsigned* a = (unsigned*)of_a;
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + _PAIRS + 1}, 0;\\n"
    "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} {{{places}}}, "
    "{{{pairs}}}, %{count + _PAIRS}, p, 1, 1, {int(leading > 0)};\\n}}\\n"
    : {outputs} : {inputs}, "l"(of_b), "r"(adds));"""
    return _call(name, "float* d, void* of_a, int b, int adds", body, sums.access_ptr("rw", extent=count),
                 a.access_ptr("r", offset=at, extent=2 * _PAIRS), b, adds)
