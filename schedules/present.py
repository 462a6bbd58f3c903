"""Results that are read on the way: computed where a copy of them is made, instead of being written first and read
again.

A language model gives back the keys and values of all tokens, former ones and new ones, and its attention reads them.
:func:`mlc.graph.kernels.query_blocks.joined` marks the block that puts them together; it is alone under the root, and
reads of it may be staged by a copy as any others. Attention reads all of it, and so does a copy that attention reads
instead. So the block may take the copy's place, and the past passes through the caches once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tvm_ffi
from tvm import s_tir, tirx

from schedules.analysis import loads, replaced, walk

__all__ = ["PRESENT", "written_on_the_way"]

#: the annotation of a block whose whole result is read by what follows it
PRESENT = "mlc.present"


def written_on_the_way(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A scheduled function whose marked results are computed in place of the only copies of them; the same object where
    there are none.

    ``for i, j: P[i, j] = f(i, j); for i: (for j: C[i, j] = P[i, j]); g(C)  -->  for i: (for j: P[i, j] = f(i, j)); g(P)``
    """
    root = func.body.block if isinstance(func.body, s_tir.SBlockRealize) else None
    statements = list(root.body) if root is not None and isinstance(root.body, tirx.SeqStmt) else []
    marked = [(nest, block) for nest in statements if (block := _marked(nest)) is not None]
    moved: list[tuple[tirx.Stmt, s_tir.SBlock, s_tir.SBlock]] = []
    for nest, block in marked:
        readers = _readers(func, block)
        if len(readers) == 1 and _is_copy(readers[0], root.alloc_buffers):
            moved.append((nest, block, readers[0]))
    if not moved:
        return func
    copies = {copy.writes[0].source: _computed(block, copy) for _, block, copy in moved}
    image = {copy.writes[0].source: block.writes[0].source for _, block, copy in moved}
    left = [each for each in statements if not any(each.same_as(nest) for nest, *_ in moved)]
    body = replaced(_with_blocks(left[0] if len(left) == 1 else tirx.SeqStmt(left), copies), image)
    allocated = [buffer for buffer in root.alloc_buffers if buffer not in image]
    made = s_tir.SBlock(root.iter_vars, root.reads, root.writes, root.name_hint, body, root.init, allocated,
                        root.match_buffers, root.annotations)
    return func.with_body(s_tir.SBlockRealize(func.body.iter_values, func.body.predicate, made))


def _marked(nest: tirx.Stmt) -> s_tir.SBlock | None:
    """The one block of a nest where that is a marked one which writes each element at its own axes."""
    found: list[s_tir.SBlock] = []
    walk(nest, (s_tir.SBlock, found.append))
    if len(found) != 1 or PRESENT not in found[0].annotations:
        return None
    store = found[0].body
    own = [axis.var for axis in found[0].iter_vars]
    return found[0] if isinstance(store, tirx.BufferStore) and _are(store.indices, own) else None


def _are(indices: Sequence[Any], variables: Sequence[tirx.Var]) -> bool:
    return len(indices) == len(variables) and all(a.same_as(b) for a, b in zip(indices, variables, strict=True))


def _readers(func: tirx.PrimFunc, block: s_tir.SBlock) -> list[s_tir.SBlock]:
    """The innermost blocks that read what a block writes."""
    written = block.writes[0].source
    found: list[s_tir.SBlock] = []

    def look(each: s_tir.SBlock) -> None:
        inner: list[s_tir.SBlock] = []
        walk(each.body, (s_tir.SBlock, inner.append))
        read = any(load.source.same_as(written) for load in loads(each.body))
        matched = any(match.source.source.same_as(written) for match in each.match_buffers)
        if (read and not inner) or matched:
            found.append(each)

    walk(func.body, (s_tir.SBlock, look))
    return found


def _is_copy(block: s_tir.SBlock, allocated: Sequence[Any]) -> bool:
    """Whether a block copies one tensor, whole rows or not, into an intermediate one of the same shape."""
    store = block.body
    if not isinstance(store, tirx.BufferStore) or block.match_buffers or not any(
            store.buffer.same_as(each) for each in allocated):
        return False
    load, own = store.value, [axis.var for axis in block.iter_vars]
    same = [*loads(store.value)] and loads(store.value)[0].same_as(load)
    return bool(same) and _are(store.indices, own) and _are(load.indices, own)


def _computed(block: s_tir.SBlock, copy: s_tir.SBlock) -> s_tir.SBlock:
    """What ``block`` does, where ``copy`` is."""
    image = {axis.var: own.var for axis, own in zip(block.iter_vars, copy.iter_vars, strict=True)}
    reads, writes = (replaced(list(each), image) for each in (block.reads, block.writes))
    return s_tir.SBlock(copy.iter_vars, list(reads), list(writes), copy.name_hint, replaced(block.body, image), None,
                        copy.alloc_buffers, [], {})


def _with_blocks(body: tirx.Stmt, blocks: Mapping[Any, s_tir.SBlock]) -> tirx.Stmt:
    """The statement with other ``blocks`` in place of those that write their keys."""
    def there(block: s_tir.SBlock) -> s_tir.SBlock:
        return blocks.get(block.writes[0].source, block) if len(block.writes) else block

    return tvm_ffi.structural_map(body, (s_tir.SBlock, there))
