"""What TVM's pipeline leaves out between a scheduled CPU function and machine code.

Eight things, all in the pipeline that :data:`PIPELINE` names (``tvm.compile(mod, target, tir_pipeline=PIPELINE)``):

Register tiles stay in registers. TVM puts local buffers of more than 1 KiB into a workspace on the heap, where LLVM
keeps them in registers only while it can prove that nothing else points there; then they go through memory once more
before the epilogue. On the stack they dissolve into registers altogether.

Weights are fetched ahead. A register tile's weights are used again by every tile of the same columns, so they come
from memory in bursts: the first tile waits for them and the others leave the memory idle. A loop that
:func:`prefetch_ahead` has marked touches the weights of the *next* tile column a few lines at a time.

Tiles of a matrix unit are configured, once in each thread (:mod:`schedules.tiles`).

Loops are not cut where a condition changes outside of them (:mod:`schedules.masks`).

Results that a kernel reads again are written where it reads them (:mod:`schedules.present`), large ones past the
caches (:mod:`schedules.streamed`).

Bytes that were sums are narrowed and stored several vectors at a time (:mod:`schedules.joined`).

Arguments that are known to fit are not checked again (:data:`FITS`).

Scopes that the code generator does not know are left out (:mod:`schedules.scopes`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import Call, TensorLoad
from tvm.s_tir.pipeline import default_s_tir_pipeline
from tvm.tirx import compilation_pipeline

from schedules.always import settled, sizes_of, untested
from schedules.analysis import loads, op_name, replaced, uses, walk
from schedules.flat import FLAT, restored
from schedules.free import SIZES, variables
from schedules.joined import joined_stores
from schedules.machine import LINE_BYTES
from schedules.masks import hidden_masks
from schedules.pieces import expanded
from schedules.present import written_on_the_way
from schedules.ragged import whole_tiles
from schedules.scopes import WithoutScopes
from schedules.streamed import streamed_stores
from schedules.tiles import with_helpers, with_tiles

__all__ = ["FITS", "PIPELINE", "insert_prefetches", "lines_per_step", "prefetch_ahead", "prefetch_rows"]

#: the name of the pipeline of CPU functions, for ``tir_pipeline``
PIPELINE = "mlc"

#: the attribute of a function whose arguments are known to be what it was compiled for: it does not check them
FITS = "mlc.fits"

_MARK = "mlc.prefetch"
_ROWS_MARK = "mlc.prefetch_rows"
#: more fetches than this in one step of the marked loop would displace the arithmetic, of which a step holds tens of
#: multiply-adds. Small tiles need the fetches most: with 5 to 16 a step, 61 Winograd convolutions took 0.87 of
#: the time (geometric mean, 0.43 to 1.24) that they took with none
_MAX_PER_STEP = 16
#: bytes of a local buffer that may lie on the stack: twice the largest vector register file
_MAX_STACK = 4096
#: how the names of intrinsics begin whose 16-bit operands are bfloat16
_TAKE_BFLOATS = ("llvm.x86.avx512bf16.", "llvm.aarch64.neon.bf")
#: for LLVM: a read, into the first or second-level cache, of data
_READ, _FIRST_LEVEL, _SECOND_LEVEL, _DATA = 0, 3, 2, 1


def prefetch_ahead(
    sch: s_tir.Schedule, loop: s_tir.schedule.LoopRV, param: int, blocks: int, distance: int
) -> None:
    """Fetch, while ``loop`` runs, what the next tile will read of the function's parameter number ``param``.

    ``loop`` is a reduction loop of a register tile. The parameter is ``[blocks, ..., 16]``, or ``[blocks, ..., 16, 4]``
    of bytes, with rows of one cache line; the tile reads ``blocks`` blocks, and the next tile those that lie
    ``distance`` blocks further. The fetches are spread evenly over the tiles that read the same blocks. Where they
    would be too dense, or rows are not cache lines, nothing is fetched.
    """
    sch.annotate(loop, _MARK, [param, blocks, distance])


def lines_per_step(lines: int, steps: int) -> int:
    """How many cache lines each step must fetch; 0 where that is too many to be worth it."""
    count = -(-lines // max(1, steps))
    return count if count <= _MAX_PER_STEP else 0


def prefetch_rows(
    sch: s_tir.Schedule, loop: s_tir.schedule.LoopRV, rows: Sequence[tuple[int, int]], lines: int
) -> None:
    """Fetch, while ``loop`` steps through rows of parameters of the function, ``lines`` cache lines a step of rows to
    come. ``rows`` holds for each parameter its number and how many elements further on the later row lies."""
    sch.annotate(loop, _ROWS_MARK, [lines, *(number for row in rows for number in row)])


def insert_prefetches(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Replace the marks of :func:`prefetch_ahead` and :func:`prefetch_rows` by prefetch instructions; the same object
    where there are none.

    ``for k: tile   -->   for k: prefetch(W[next tile, line]); tile``
    """
    loops: list[tirx.For] = []
    walk(func.body, (tirx.For, loops.append))
    bodies = {loop.loop_var: _with_fetches(func, loop, loops) for loop in loops if _MARK in loop.annotations}
    bodies |= {loop.loop_var: _with_rows(func, loop) for loop in loops if _ROWS_MARK in loop.annotations}
    if not bodies:
        return func

    def replace(loop: tirx.For) -> tirx.For:
        body = bodies.get(loop.loop_var)
        if body is None:
            return loop
        kept = {key: value for key, value in loop.annotations.items() if key not in (_MARK, _ROWS_MARK)}
        return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body, annotations=kept)

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.For, replace)))


def _with_fetches(func: tirx.PrimFunc, loop: tirx.For, loops: Sequence[tirx.For]) -> tirx.Stmt:
    """The body of a marked loop, with the fetches before it."""
    param, blocks, distance = (int(v) for v in loop.annotations[_MARK])
    buffer = func.params[param]
    shape = [int(extent) for extent in buffer.shape]
    base = _first_index(loop, buffer)
    item = tvm.runtime.DataType(str(buffer.dtype)).bits // 8
    row = next((n for n in range(1, len(shape) - 1) if prod(shape[-n:]) * item == LINE_BYTES), 0)  # axes of one line
    if base is None or not row:
        return loop.body
    # the tiles that read the same blocks: serial loops around this one that the blocks' address does not depend on
    outwards = [each for each in loops if _contains(each, loop)]  # a walk meets inner loops first
    around = [each for each in reversed(outwards) if each.kind != tirx.ForKind.PARALLEL]
    reusing = [each for each in around if not uses(base[0], [each.loop_var])]
    if not all(isinstance(each.extent, tirx.IntImm) for each in (*reusing, loop)):
        return loop.body  # as many steps as a free size says
    steps = prod(int(each.extent) for each in (*reusing, loop))
    count = lines_per_step(blocks * prod(shape[1:-row]), steps)
    step: Any = tirx.const(0, "int32")
    for each in (*reusing, loop):
        step = step * each.extent + each.loop_var
    fetches = []
    for number in range(count):
        line = [*base[1 : -row - 1], base[-row - 1] + step * count + number, *[tirx.const(0, "int32")] * row]
        fetches.append(_fetch(tirx.BufferLoad(buffer, [base[0] + distance, *line]), _SECOND_LEVEL))
    return tirx.SeqStmt([*fetches, loop.body]) if fetches else loop.body


def _with_rows(func: tirx.PrimFunc, loop: tirx.For) -> tirx.Stmt:
    """The body of a loop over rows, with the fetches of later rows before it."""
    lines, *numbers = (int(v) for v in loop.annotations[_ROWS_MARK])
    fetches = []
    for param, distance in zip(numbers[::2], numbers[1::2], strict=True):
        buffer = func.params[param]
        base = _first_index(loop, buffer, from_start=False)
        elements = LINE_BYTES * 8 // tvm.runtime.DataType(str(buffer.dtype)).bits
        if base is None:
            continue
        for n in range(lines):
            load = tirx.BufferLoad(buffer, [*base[:-1], base[-1] + distance + n * elements])
            fetches.append(_fetch(load, _FIRST_LEVEL))
    return tirx.SeqStmt([*fetches, loop.body]) if fetches else loop.body


def _fetch(load: tirx.BufferLoad, level: int) -> tirx.Stmt:
    """A prefetch instruction. What it names may lie past the end of a tensor: it has no other effect."""
    flags = [tirx.const(flag, "int32") for flag in (_READ, level, _DATA)]
    return tirx.Evaluate(tirx.call_intrin("void", "tirx.prefetch", tirx.address_of(load), *flags))


def _first_index(loop: tirx.For, buffer: tirx.Buffer, from_start: bool = True) -> list[Any] | None:
    """Where the tile inside ``loop`` begins to read ``buffer``, in terms of the loops outside the reduction:
    ``from_start`` at the loop's first iteration, else at the one under way."""
    realizes: list[s_tir.SBlockRealize] = []
    inner = [loop.loop_var] if from_start else []
    walk(loop.body, (s_tir.SBlockRealize, realizes.append), (tirx.For, lambda each: inner.append(each.loop_var)))
    values = {
        iterator.var: tirx.const(0, "int32") if iterator.iter_type == tirx.IterVar.CommReduce else value
        for realize in realizes
        for iterator, value in zip(realize.block.iter_vars, realize.iter_values, strict=True)
    }
    start = {var: tirx.const(0, "int32") for var in inner}
    indices = next((found for realize in realizes if (found := _indices(realize.block, buffer)) is not None), None)
    if indices is None:
        return None
    for _ in realizes:  # a block's iterators may be in terms of those of the block around it
        indices = [replaced(index, values) for index in indices]
    return [replaced(index, start) for index in indices]


def _indices(block: s_tir.SBlock, buffer: tirx.Buffer) -> list[Any] | None:
    """Where a block reads ``buffer`` itself, or hands it to an intrinsic."""
    loads: list[TensorLoad] = []
    walk(block.body, (TensorLoad, loads.append))
    found = [list(load.indices) for load in loads if load.source.same_as(buffer)]
    found += [[r.min for r in m.source.region] for m in block.match_buffers if m.source.source.same_as(buffer)]
    return found[0] if found else None


def _contains(outer: tirx.For, inner: tirx.For) -> bool:
    if outer.same_as(inner):
        return False
    found = [False]

    def look(loop: tirx.For) -> None:
        found[0] = found[0] or loop.same_as(inner)

    walk(outer.body, (tirx.For, look))
    return found[0]


def _keep_on_stack(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Leave small local buffers to LLVM's stack."""

    def mark(allocation: tirx.AllocBuffer) -> tirx.AllocBuffer:
        buffer = allocation.buffer
        dtype = tvm.runtime.DataType(str(buffer.dtype))
        known = all(isinstance(extent, tirx.IntImm) for extent in buffer.shape)
        if str(buffer.scope()) != "local" or not known:
            return allocation
        if prod(int(extent) for extent in buffer.shape) * dtype.bits * dtype.lanes // 8 > _MAX_STACK:
            return allocation
        kept = {**dict(allocation.annotations), "disable_lower_builtin": tirx.const(True, "bool")}
        return tirx.AllocBuffer(buffer, kept)

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.AllocBuffer, mark)))


def _with_bfloats(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Hand vectors of uint16 as bfloat16 to those of LLVM's intrinsics that take it.

    TVM's legalisation leaves no value of that type, and its code generator knows none. So the intrinsic is called by a
    function of LLVM's own language, which is inlined.
    """
    helpers: dict[str, str] = {}

    def mark(call: Call) -> Call:
        if op_name(call) != "call_llvm_pure_intrin":
            return call
        name = str(tvm.get_global_func("target.llvm_get_intrinsic_name")(int(call.args[0])))
        if not name.startswith(_TAKE_BFLOATS):
            return call
        helper = f"mlc_{name.replace('.', '_')}"
        helpers[helper] = _bfloat_helper(helper, name, str(call.ty), [str(a.ty) for a in call.args[1:]])
        return tirx.call_pure_extern(str(call.ty), helper, *call.args[1:])

    body = tvm_ffi.structural_map(func.body, (Call, mark))
    if not helpers:
        return func
    text = tvm.ir.StringImm("\n".join(helpers.values()))
    return func.with_body(tirx.AttrStmt(tirx.const(0, "int32"), "pragma_import_llvm", text, body))


def _bfloat_helper(helper: str, name: str, result: str, operands: Sequence[str]) -> str:
    """A function of LLVM that calls the intrinsic ``name`` with its operands of uint16 as bfloat16."""

    def vector(dtype: str, word: str) -> str:
        kind, _, lanes = dtype.partition("x")
        return f"<{lanes} x {dict(float32='float', uint16=word)[kind]}>"

    result, given = vector(result, ""), [vector(t, "i16") for t in operands]
    taken = [vector(t, "bfloat") for t in operands]
    casts = [f"  %c{i} = bitcast {a} %a{i} to {b}" for i, (a, b) in enumerate(zip(given, taken, strict=True))]
    parameters = ", ".join(f"{dtype} %a{i}" for i, dtype in enumerate(given))
    arguments = ", ".join(f"{dtype} %c{i}" for i, dtype in enumerate(taken))
    return "\n".join([
        f"declare {result} @{name}({', '.join(taken)})",
        f"define linkonce_odr {result} @{helper}({parameters}) alwaysinline {{",
        *casts,
        f"  %r = call {result} @{name}({arguments})",
        f"  ret {result} %r",
        "}",
    ])


def _lower_free(mod: tvm.IRModule, ctx: tvm.transform.PassContext, lower: tvm.transform.Pass) -> tvm.IRModule:
    """TVM's ``lower``, with local buffers of functions with free sizes as large as their ranges need.

    TVM derives a tile's extents from what a block touches. It knows no ranges (``T.min((n - 1) // 16 + 1, 1) * 16`` is
    16 for every ``n`` from 1), and a ragged tile may have any extent for it.
    """
    free = {
        var: func for var, func in mod.functions_items()
        if isinstance(func, tirx.PrimFunc) and func.attrs and SIZES in func.attrs
    }
    if not free:
        return lower(mod)
    made = {var: restored(_bounded(settled(_compacted(func)))) for var, func in free.items()}
    once = tvm.IRModule(made, attrs=mod.attrs)
    rest = tvm.IRModule({
        var: restored(func) if isinstance(func, tirx.PrimFunc) else func
        for var, func in mod.functions_items() if var not in free
    }, attrs=mod.attrs)
    config = {
        **ctx.config,
        "tirx.disable_cse_tir": True,  # what is put into variables is not seen through
        # of a loop of one step TVM leaves a 0 of 32 bits among sizes of 64, which later passes refuse
        "s_tir.LoopPartition": {"no_unroll_loop_with_extent_one": True},
    }
    with tvm.transform.PassContext(opt_level=ctx.opt_level, config=config, instruments=[_CompactedAlready()]):
        once = lower(once)
    known = {str(func.attrs["global_symbol"]): sizes_of(func) for func in free.values() if FLAT not in func.attrs}
    once = tvm.IRModule({var: _untested(func, known) for var, func in once.functions_items()}, attrs=once.attrs)
    once = tirx.transform.CommonSubexprElim()(once)
    once = tvm.IRModule({var: _with_numbers_in_place(func) for var, func in once.functions_items()}, attrs=once.attrs)
    rest = lower(rest)
    rest.update(once)
    return rest


def _unchecked(mod: tvm.IRModule) -> tvm.IRModule:
    """The lowered module without the checks of arguments in functions that are marked by :data:`FITS`."""
    fits = {var: func for var, func in mod.functions_items() if func.attrs and FITS in func.attrs}
    if fits:
        mod.update(tirx.transform.SkipAssert()(tvm.IRModule(fits, attrs=mod.attrs)))
    return mod


def _with_numbers_in_place(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function without variables for sizes as floating-point numbers, of which the code generator wants to know
    within which whole numbers they lie, and fails.

    ``x = float32(n); .. y / x   -->   .. y / float32(n)``
    """
    image: dict[tirx.Var, Any] = {}

    def look(bound: tirx.Bind) -> None:
        value = replaced(bound.value, image)
        if str(bound.var.ty).startswith("float") and _is_cast(value):
            image[bound.var] = value

    walk(func.body, (tirx.Bind, look))
    if not image:
        return func
    nothing = tirx.Evaluate(0)
    return func.with_body(replaced(tvm_ffi.structural_map(
        func.body, (tirx.Bind, lambda bound: nothing if bound.var in image else bound)), image))


def _is_cast(value: Any) -> bool:
    """Whether a cast of a whole number is in it that reads no memory."""
    casts: list[bool] = []
    walk(value, (tirx.Cast, lambda cast: casts.append("int" in str(cast.value.ty) and not loads(cast.value))))
    return any(casts)


def _untested(func: tirx.PrimFunc, known: Mapping[str, Sequence[tuple[tirx.Var, int, int]]]) -> tirx.PrimFunc:
    """A lowered function by the ``known`` sizes of the one that it was made of."""
    symbol = str(func.attrs["global_symbol"]).removeprefix("__tvm_ffi_")
    return untested(func, known[symbol]) if symbol in known else func


def _bounded(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with a condition that its sizes fulfil around all that it does: TVM's analyzers go by it.

    ``for i: if 29 <= n: ..   -->   if 128 <= n <= 512: for i: ..``
    """
    ends = zip(variables(func), func.attrs[SIZES], strict=True)
    inside = [bound for var, (low, high, _) in ends for bound in (var >= int(low), var <= int(high))]
    root = func.body.block
    body = tirx.IfThenElse(tirx.all(*inside), root.body, None)
    block = s_tir.SBlock(root.iter_vars, root.reads, root.writes, root.name_hint, body, root.init, root.alloc_buffers,
                         root.match_buffers, root.annotations)
    return func.with_body(s_tir.SBlockRealize(func.body.iter_values, func.body.predicate, block))


@tvm.ir.instrument.pass_instrument
class _CompactedAlready:
    def should_run(self, _mod: tvm.IRModule, info: tvm.transform.PassInfo) -> bool:
        return str(info.name) != "s_tir.CompactBufferAllocation"


_TO_OPAQUE = tvm.transform.Sequential([
    s_tir.transform.CanonicalizeLoop(), s_tir.transform.LowerCrossThreadReduction(), s_tir.transform.LowerInitBlock(),
    s_tir.transform.PlanAndUpdateBufferAllocationLocation(), s_tir.transform.ConvertBlocksToOpaque(),
])


def _compacted(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with opaque blocks and compact buffers, and numbers for the extents of local ones."""
    opaque = _TO_OPAQUE(tvm.IRModule({"main": func, "tiles": whole_tiles(func)}))
    compact = s_tir.transform.CompactBufferAllocation()
    try:
        found = compact(opaque)["tiles"]
    except ValueError:  # to it a size is any number of 32 bits, and what it multiplies that by may need more
        opaque = tvm.IRModule({var: _clamped(each) for var, each in opaque.functions_items()})
        found = compact(opaque)["tiles"]
    analyzer = tvm.sym.Analyzer()
    for var, (low, high, _) in zip(variables(func), func.attrs[SIZES], strict=True):
        bounds = (tirx.const(int(end), str(var.ty)) for end in (low, int(high) + 1))
        analyzer.bind(var, tvm.ir.Range(*bounds))
    made, all_given = _buffers(found), _buffers(opaque["tiles"])
    wrong = [_is_wrong(*pair, analyzer) for pair in zip(made, all_given, strict=True)]
    if not any(wrong):
        return found
    whole = compact(tvm.IRModule({"main": _without_predicates(opaque["main"])}))["main"]  # its tiles are all full
    image: dict[tirx.Var, tirx.Var] = {}
    for buffer, full, given, is_wrong in zip(made, _buffers(whole), all_given, wrong, strict=True):
        if is_wrong:
            if str(buffer.scope()) == "local":
                # along an axis that TVM has left whole, a tile does not begin at 0
                ends = zip(buffer.shape, full.shape, given.shape, strict=True)
                extents = [own if analyzer.can_prove_equal(own, all_of) else extent for own, extent, all_of in ends]
                shape = [tirx.const(_largest(extent, analyzer), str(extent.ty)) for extent in extents]
            else:  # what TVM has no bound of is as long as the whole axis
                pairs = zip(full.shape, given.shape, strict=True)
                shape = [all_of if _exceeds(extent, all_of, analyzer) else extent for extent, all_of in pairs]
            image[buffer] = tirx.decl_buffer(shape, str(buffer.dtype), name=str(buffer.name), scope=buffer.scope())
    return found.with_body(replaced(found.body, image))


def _clamped(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with its free sizes written so that their ranges can be read off."""
    image = {var: tirx.max(tirx.min(var, tirx.const(int(high), str(var.ty))), tirx.const(int(low), str(var.ty)))
             for var, (low, high, _) in zip(variables(func), func.attrs[SIZES], strict=True)}
    return func.with_body(replaced(func.body, image))


def _buffers(func: tirx.PrimFunc) -> list[tirx.Var]:
    """What a function's blocks allocate."""
    found: list[tirx.Var] = []
    walk(func.body, (s_tir.SBlock, lambda block: found.extend(block.alloc_buffers)))
    return found


def _largest(extent: Any, analyzer: Any) -> int:
    return int(analyzer.const_int_bound(analyzer.simplify(extent)).max_value)


def _is_wrong(buffer: tirx.Var, given: tirx.Var, analyzer: Any) -> bool:
    """Whether a compact buffer is larger than it need be: a local one is no small tile, or another has more of an axis
    than the buffer that was ``given``. A chunk of as many rows as two divisions are apart has any number to TVM."""
    if str(buffer.scope()) == "local":
        return not _is_small(buffer)
    return any(_exceeds(*pair, analyzer) for pair in zip(buffer.shape, given.shape, strict=True))


def _exceeds(extent: Any, whole: Any, analyzer: Any) -> bool:
    """Whether an extent is a number that the ``whole`` axis does not reach."""
    return isinstance(extent, tirx.IntImm) and int(extent) > _largest(whole, analyzer)


def _is_small(buffer: tirx.Var) -> bool:
    """Whether a local buffer has numbers for extents, as a tile has."""
    return all(isinstance(e, tirx.IntImm) for e in buffer.shape) and prod(map(int, buffer.shape)) <= _MAX_STACK


def _without_predicates(func: tirx.PrimFunc) -> tirx.PrimFunc:
    always = tirx.const(True, "bool")

    def without(realize: s_tir.SBlockRealize) -> s_tir.SBlockRealize:
        return s_tir.SBlockRealize(realize.iter_values, always, realize.block)

    return func.with_body(tvm_ffi.structural_map(func.body, (s_tir.SBlockRealize, without)))


_ExpandPieces = tvm.transform.module_pass(lambda mod, _ctx: expanded(mod), opt_level=0, name="mlc.ExpandPieces")
_WriteOnTheWay = tirx.transform.prim_func_pass(
    lambda func, _mod, _ctx: written_on_the_way(func), opt_level=0, name="mlc.WriteOnTheWay"
)
_InsertPrefetches = tirx.transform.prim_func_pass(
    lambda func, _mod, _ctx: insert_prefetches(func), opt_level=0, name="mlc.InsertPrefetches"
)
_HideMasks = tirx.transform.prim_func_pass(
    lambda func, _mod, _ctx: hidden_masks(func), opt_level=0, name="mlc.HideMasks"
)
_KeepOnStack = tirx.transform.prim_func_pass(
    lambda func, _mod, _ctx: _keep_on_stack(func), opt_level=0, name="mlc.KeepOnStack"
)
_JoinStores = tirx.transform.prim_func_pass(
    lambda func, _mod, _ctx: joined_stores(func), opt_level=0, name="mlc.JoinStores"
)
_StreamStores = tirx.transform.prim_func_pass(
    lambda func, _mod, _ctx: streamed_stores(func), opt_level=0, name="mlc.StreamStores"
)
_WithBfloats = tirx.transform.prim_func_pass(
    lambda func, _mod, _ctx: _with_bfloats(func), opt_level=0, name="mlc.WithBfloats"
)
_WithTiles = tirx.transform.prim_func_pass(
    lambda func, _mod, _ctx: with_tiles(func), opt_level=0, name="mlc.WithTiles"
)
_WithHelpers = tirx.transform.prim_func_pass(
    lambda func, _mod, _ctx: with_helpers(func), opt_level=0, name="mlc.WithHelpers"
)


def _pipeline() -> tuple[Any, Any, Any]:
    lower, finish_host, finish_device = default_s_tir_pipeline()

    def host() -> tvm.transform.Pass:
        steps = [_StreamStores, _JoinStores, _KeepOnStack, _WithBfloats, _WithHelpers, finish_host()]
        return tvm.transform.Sequential(steps)

    @tvm.transform.module_pass(opt_level=0, name="mlc.Lower")
    def lowered(mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return _unchecked(_lower_free(mod, ctx, lower))

    steps = [WithoutScopes, _ExpandPieces, _WriteOnTheWay, _InsertPrefetches, _WithTiles, _HideMasks, lowered]
    return tvm.transform.Sequential(steps), host, finish_device


compilation_pipeline.register_tir_pipeline(PIPELINE, _pipeline)
