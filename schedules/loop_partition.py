"""Hides conditions from TVM's LoopPartition that it would partition wrongly.

``LoopPartition`` cuts a marked loop where conditions in it start or cease to hold, so that only a partial end is
tested. It cannot handle

- a condition that also depends on loops around (a triangle, say): the cut may lie before or after the loop, which the
  pass takes for a number of iterations, so that it runs the loop from a negative index;
- several conditions that cut one loop at free sizes (the parts of a concatenation): the simplification of which cut
  comes first does not end;
- a condition on a free size inside an index (a mirrored border): once it is cut, the last tile reads elsewhere;
- a reduction whose first and last cuts overlap for small images: the overlap would be executed twice.

Such a condition is written in a form that the pass cannot solve.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx

from schedules.analysis import loads, replaced, uses, walk
from schedules.free import SIZES, variables

__all__ = ["HINT", "hide_conditions"]

#: of a loop that is to be cut
HINT = "pragma_loop_partition_hint"

_COMPARISONS = (tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.EQ, tirx.NE)
_OPPOSITE = {tirx.LT: tirx.GE, tirx.LE: tirx.GT, tirx.GT: tirx.LE, tirx.GE: tirx.LT}


def hide_conditions(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A scheduled function whose marked loops are not cut by conditions that may change outside of them; the same
    object where there are none.

    ::

        for i in range(65):                              for i in range(65):
            for j in range(2):  # marked                     for j in range(2):  # marked
                B[i, j] = select(j * 4 + 5 * t <= i,  -->        B[i, j] = select(max(j * 4 + 5 * t - i, 0) == 0,
                                 A[i, j], 0)                                      A[i, j], 0)
    """
    if not _any_mark(func):
        return func
    ranges = {}
    if func.attrs and SIZES in func.attrs:
        for var, (low, high, _) in zip(variables(func), func.attrs[SIZES], strict=True):
            ranges[var] = tvm.ir.Range(tirx.const(int(low), str(var.ty)), tirx.const(int(high) + 1, str(var.ty)))
    masks = _Masks(ranges)
    masks.visit(func.body, ranges, {}, [], [])
    return func.with_body(masks.hidden(func.body)) if masks.found else func


def _any_mark(func: tirx.PrimFunc) -> bool:
    marks: list[bool] = []
    walk(func.body, (tirx.For, lambda loop: marks.append(HINT in loop.annotations)))
    return any(marks)


class _Masks:
    """The conditions of a function by which loops must not be cut."""

    def __init__(self, sizes: Iterable[tirx.Var]) -> None:
        self.found: list[Any] = []
        self._sizes = frozenset(sizes)

    def visit(
        self, statement: Any, ranges: Mapping[tirx.Var, tvm.ir.Range], values: Mapping[tirx.Var, Any],
        marked: list[tirx.For], tests: list[Any],
    ) -> None:
        """Look through ``statement``: ``ranges`` are those of the sizes and of the loops around it, ``values`` what the
        iterators of blocks around it are of these, ``marked`` the loops around it that are to be cut, ``tests`` the
        predicates of the blocks."""
        if isinstance(statement, tirx.For):
            inside = {**ranges, statement.loop_var: tvm.ir.Range.from_min_extent(statement.min, statement.extent)}
            own = [statement] if HINT in statement.annotations else []
            self.visit(statement.body, inside, values, [*marked, *own], tests)
        elif isinstance(statement, tirx.SeqStmt):
            for part in statement.seq:
                self.visit(part, ranges, values, marked, tests)
        elif isinstance(statement, s_tir.SBlockRealize):
            block = statement.block
            mine = {each.var: replaced(value, values)
                    for each, value in zip(block.iter_vars, statement.iter_values, strict=True)}
            for part in (block.init, block.body):
                if part is not None:
                    self.visit(part, ranges, {**values, **mine}, marked,
                               [*tests, *_comparisons(replaced(statement.predicate, values))])
        elif isinstance(statement, tirx.IfThenElse | tirx.AttrStmt):
            parts = [statement.body] if isinstance(statement, tirx.AttrStmt) else [
                statement.then_case, statement.else_case]
            for part in parts:
                if part is not None:
                    self.visit(part, ranges, values, marked, tests)
        elif marked:
            self._look(statement, ranges, values, marked, tests)

    def _look(
        self, statement: Any, ranges: Mapping[tirx.Var, tvm.ir.Range], values: Mapping[tirx.Var, Any],
        marked: list[tirx.For], tests: list[Any],
    ) -> None:
        comparisons = [(each, replaced(each, values)) for each in _comparisons(statement)]
        places = [each for load in loads(statement) for index in load.indices for each in _comparisons(index)]
        for loop in marked:
            by_sizes = [each for each, plain in comparisons
                        if uses(plain, [loop.loop_var]) and uses(plain, list(self._sizes))]
            if any(not tvm_ffi.structural_equal(each, by_sizes[0]) for each in by_sizes):
                self.found += by_sizes
            else:
                self.found += [each for each in by_sizes if any(tvm_ffi.structural_equal(each, one) for one in places)]
        for comparison, plain in comparisons:
            if any(not _cuts_inside(plain, loop, ranges, self._sizes) for loop in marked):
                self.found.append(comparison)
        for loop in marked:
            if _adds_up(statement, loop):
                kept = [(each, plain) for each, plain in comparisons
                        if not any(tvm_ffi.structural_equal(each, one) for one in self.found)]
                self.found += _overlapping(kept, tests, loop, ranges)

    def hidden(self, body: Any) -> Any:
        def hide(comparison: Any) -> Any:
            if not any(tvm_ffi.structural_equal(comparison, each) for each in self.found):
                return comparison
            return _opaque(comparison)

        return tvm_ffi.structural_map(body, (_COMPARISONS, hide))


def _opaque(comparison: Any) -> Any:
    """A comparison of whole numbers as one of a maximum, which the pass cannot solve for a loop's variable."""
    a, b = comparison.a, comparison.b
    if isinstance(comparison, tirx.EQ):
        return tirx.all(_at_most(a, b), _at_most(b, a))
    if isinstance(comparison, tirx.NE):
        return tirx.any(_at_most(a + 1, b), _at_most(b + 1, a))
    if isinstance(comparison, tirx.LT | tirx.LE):
        return _at_most(a + 1 if isinstance(comparison, tirx.LT) else a, b)
    return _at_most(b + 1 if isinstance(comparison, tirx.GT) else b, a)


def _at_most(a: Any, b: Any) -> Any:
    zero = tirx.const(0, str(a.ty))
    return tirx.EQ(tirx.Max(a - b, zero), zero)


def _comparisons(statement: Any) -> list[Any]:
    """The comparisons of integers."""
    found: list[Any] = []
    walk(statement, *((kind, found.append) for kind in _COMPARISONS))
    return [each for each in found if str(each.a.ty).startswith("int")]


def _cuts_inside(
    comparison: Any, loop: tirx.For, ranges: Mapping[tirx.Var, tvm.ir.Range], sizes: frozenset[tirx.Var]
) -> bool:
    """Whether the places where a comparison changes along a loop lie in the loop or at one of its ends."""
    around = _around(loop, ranges)
    loops = [var for var in around if var not in sizes]
    if not uses(comparison, [loop.loop_var]) or not uses(comparison, loops):
        return True  # nothing to cut by, or a cut at a number or a size, which the loop's own extent follows
    analyzer = tvm.sym.Analyzer()
    for var, r in around.items():
        analyzer.bind(var, r)
    opposite = _OPPOSITE.get(type(comparison))
    for each in (comparison, *([opposite(comparison.a, comparison.b)] if opposite else [])):
        held = _held(each, loop, ranges)
        if held is None:
            continue
        first, last = held
        if _is_number(last) and not analyzer.can_prove(last >= loop.min - 1):
            return False
        if _is_number(first) and not analyzer.can_prove(first <= loop.min + loop.extent):
            return False
    return True


def _adds_up(statement: Any, loop: tirx.For) -> bool:
    """Whether a statement adds to what was there before the loop: to run an iteration twice changes the sum."""
    if not isinstance(statement, tirx.BufferStore):
        return False
    buffer = statement.buffer
    stores: list[Any] = []
    begun: list[Any] = []
    walk(loop.body, (tirx.BufferStore, stores.append),
         (s_tir.SBlock, lambda block: begun.extend(each.source for each in block.writes if block.init is not None)))
    begun += [each.buffer for each in stores if not _reads(each, each.buffer)]
    return _reads(statement, buffer) and not any(each.same_as(buffer) for each in begun)


def _reads(statement: Any, buffer: Any) -> bool:
    return any(load.source.same_as(buffer) for load in loads(statement))


def _overlapping(
    comparisons: list[tuple[Any, Any]], tests: list[Any], loop: tirx.For, ranges: Mapping[tirx.Var, tvm.ir.Range]
) -> list[Any]:
    """The comparisons that may begin to hold behind the place where another one, or one of ``tests``, has ceased to."""
    analyzer = tvm.sym.Analyzer()
    for var, r in _around(loop, ranges).items():
        analyzer.bind(var, r)
    found = [(each, _held(plain, loop, ranges)) for each, plain in [*comparisons, *((None, test) for test in tests)]
             if uses(plain, [loop.loop_var])]
    lasts = [held[1] for _, held in found if held is not None and _is_number(held[1])]
    return [each for each, held in found if each is not None and held is not None and _is_number(held[0])
            and not all(analyzer.can_prove(held[0] <= last + 1) for last in lasts)]


def _held(comparison: Any, loop: tirx.For, ranges: Mapping[tirx.Var, tvm.ir.Range]) -> tuple[Any, Any] | None:
    """The first and the last iteration of a loop in which a comparison holds whatever the loops inside are at."""
    around = _around(loop, ranges)
    inside = {var: r for var, r in ranges.items() if var not in around and not var.same_as(loop.loop_var)}
    known, relaxed = ({var: _interval(r) for var, r in each.items()} for each in (around, inside))
    held = tvm.sym.deduce_bound(loop.loop_var, comparison, known, relaxed)
    return (held.min_value, held.max_value) if isinstance(held, tvm.sym.IntervalSet) else None


def _around(loop: tirx.For, ranges: Mapping[tirx.Var, tvm.ir.Range]) -> dict[tirx.Var, tvm.ir.Range]:
    """The sizes and the loops around a loop: those before it, for ``ranges`` goes from the outside in."""
    found: dict[tirx.Var, tvm.ir.Range] = {}
    for var, r in ranges.items():
        if var.same_as(loop.loop_var):
            break
        found[var] = r
    return found


def _interval(r: tvm.ir.Range) -> Any:
    return tvm.sym.IntervalSet(r.min, r.min + r.extent - 1)


def _is_number(bound: Any) -> bool:
    """Whether an end of an interval is a number, not beyond all numbers."""
    return not (isinstance(bound, tirx.Var) and str(bound.name) in ("pos_inf", "neg_inf"))
