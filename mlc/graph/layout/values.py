"""The values of a graph in the layouts that operators request, each conversion made only once."""

from __future__ import annotations

from dataclasses import dataclass, field

from tvm import relax, te, tirx

from mlc.graph.ir.channels import ChannelBlocks
from mlc.graph.ir.rewrite import leaves, replaced, shape_of
from mlc.sizes import Size

__all__ = ["Values", "in_blocks"]


def in_blocks(x: te.Tensor, blocks: int, size: int, each: int, full: int) -> te.Tensor:
    """``[N, C, H, W] -> [N, blocks, H, W, size]``, of groups of ``each`` channels in ``full`` lanes."""
    n, _, h, w = x.shape

    def block(ni, bi, hi, wi, li):  # type: ignore[no-untyped-def]
        lane = bi * size + li
        if each == full:
            return x[ni, lane, hi, wi]
        zero = tirx.const(0, x.dtype)
        return tirx.if_then_else(lane % full < each, x[ni, lane // full * each + lane % full, hi, wi], zero)

    return te.compute((n, blocks, h, w, size), block, name="blocked")


def _unblocked(x: te.Tensor, channels: int, each: int, full: int) -> te.Tensor:
    """``[N, C/c, H, W, c] -> [N, channels, H, W]``, of groups of ``each`` channels in ``full`` lanes."""
    n, _, h, w, lanes = x.shape

    def plain(ni, ci, hi, wi):  # type: ignore[no-untyped-def]
        lane = ci if each == full else ci // each * full + ci % each
        return x[ni, lane // lanes, hi, wi, lane % lanes]

    return te.compute((n, channels, h, w), plain, name="unblocked")


@dataclass
class _Value:
    """One value of the graph in the layouts made of it so far."""

    plain: relax.Expr | None = None
    blocked: dict[ChannelBlocks, relax.Expr] = field(default_factory=dict)


class Values:
    """The values of a graph's variables in the function that ``bb`` builds, each in the layouts made so far."""

    def __init__(self, bb: relax.BlockBuilder) -> None:
        self.bb = bb
        self._values: dict[relax.Var, _Value] = {}

    def keep(self, var: relax.Var, expr: relax.Expr, layout: ChannelBlocks | None = None) -> None:
        """``expr`` is the graph's ``var`` in this layout (left out: the plain one)."""
        self._values[var] = _Value(plain=expr) if layout is None else _Value(blocked={layout: expr})

    def _value(self, expr: relax.Expr) -> _Value:
        return self._values.get(expr, _Value(plain=expr)) if isinstance(expr, relax.Var) else _Value(plain=expr)

    def substitute(self, expr: relax.Expr) -> relax.Expr:
        """``expr`` with every variable in its plain layout."""
        return replaced(expr, {var: self.plain(var) for var in leaves(expr)})

    def plain(self, var: relax.Var) -> relax.Expr:
        """The value in its plain layout, ``[N, C, H, W]`` if it is an image."""
        value = self._value(var)
        if value.plain is None:
            layout, expr = next(iter(value.blocked.items()))
            value.plain = self.bb.emit(self._unblock(expr, layout))
        return value.plain

    def blocked(self, expr: relax.Expr, layout: ChannelBlocks) -> relax.Expr:
        """The image in this layout, ``[N, C/c, H, W, c]``; ``expr`` is a variable or a constant."""
        value = self._value(expr)
        if layout not in value.blocked:
            plain = self.plain(expr) if isinstance(expr, relax.Var) else expr
            value.blocked[layout] = self.bb.emit(self.block(plain, layout))
        return value.blocked[layout]

    def block(self, x: relax.Expr, layout: ChannelBlocks) -> relax.Expr:
        """Converts a plain image to this layout."""
        n, c, h, w = shape_of(x)
        each, full = c // layout.groups, layout.per_group * layout.size
        op = relax.op
        if isinstance(h, Size) or isinstance(w, Size):  # reshapes divide by them
            return self.bb.call_te(in_blocks, x, layout.blocks, layout.size, each, full, primfunc_name_hint="blocked")
        if layout.padded:
            x = self.bb.emit(op.reshape(x, (n, layout.groups, each, h, w)))
            x = self.bb.emit(op.nn.pad(x, [0, 0, 0, 0, 0, full - each, 0, 0, 0, 0]))
        if h == w == 1:
            return op.reshape(x, (n, layout.blocks, 1, 1, layout.size))
        x = self.bb.emit(op.reshape(x, (n, layout.blocks, layout.size, h, w)))
        return op.permute_dims(x, [0, 1, 3, 4, 2])

    def _unblock(self, x: relax.Expr, layout: ChannelBlocks) -> relax.Expr:
        n, _, h, w, _ = shape_of(x)
        op = relax.op
        each, full = layout.channels // layout.groups, layout.per_group * layout.size
        if isinstance(h, Size) or isinstance(w, Size):  # reshapes divide by them
            return self.bb.call_te(_unblocked, x, layout.channels, each, full, primfunc_name_hint="unblocked")
        if not h == w == 1:
            x = self.bb.emit(op.permute_dims(x, [0, 1, 4, 2, 3]))
        if layout.padded:
            x = self.bb.emit(op.reshape(x, (n, layout.groups, full, h, w)))
            x = self.bb.emit(op.strided_slice(x, [2], [0], [each]))
        return op.reshape(x, (n, layout.channels, h, w))
