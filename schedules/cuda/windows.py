"""Convolutions as products of warpgroups: rows of a tile are windows of the image at a box of pixels.

Of each place of a window a box of the image's pixels is copied, 64 channels of each, as many lines and columns further
as the place is; what lies outside of the image comes as zeros. So the image is neither padded nor unrolled. Channels
that are no multiple of 64 are filled up with zeros, in the image and in the weight.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from schedules.cuda import hopper
from schedules.cuda.emit import i32
from schedules.cuda.image import WIDE, Image
from schedules.cuda.product import Operand, Product
from schedules.cuda.warpgroups import GroupTile, Warpgroups

__all__ = ["WindowGroups"]


class WindowGroups(Warpgroups):
    """The kernel of a product whose ``a`` is an image."""

    def __init__(self, func: tirx.PrimFunc, product: Product, tile: GroupTile, grid: int) -> None:
        super().__init__(func, product, tile, grid)
        assert isinstance(product.a, Image)
        self.image = product.a
        self.boxes = self.image.boxes(tile.block_m, boxed=bool(tile.boxed))
        #: whether the channels of a place are filled up to whole pieces, of the weight too
        self.filled = self.image.depth != product.k

    def _encode(self, side: str, operand: Any, rows: int) -> list[tirx.Stmt]:
        image, (images, lines, columns) = self.image, self.boxes.shape
        if operand is image:
            return hopper.encode(
                self.maps[side], tirx.address_of(image.first), self.product.dtype, image.sizes, image.byte_strides,
                (WIDE, columns, lines, images), (1, *reversed(image.strides), 1))
        if not self.filled:
            return super()._encode(side, operand, rows)
        batches, step = ((operand.batch,), (2 * operand.batch_step,)) if operand.batch > 1 else ((), ())
        return hopper.encode(
            self.maps[side], tirx.address_of(operand.first), self.product.dtype,
            (image.channels, image.window[0] * image.window[1], operand.rows, *batches),
            (2 * image.channels, 2 * operand.row_step, *step),
            (WIDE, 1, rows // self._shares(operand), *(1 for _ in batches)))

    def _encode_results(self, results: Operand) -> list[tirx.Stmt]:
        images, height, width = self.boxes.results
        sizes, box = [results.depth, width, height, images], [WIDE, *reversed(self.boxes.slice)]
        strides = [2 * results.row_step * count for count in (1, width, width * height)]
        if results.batch > 1:
            sizes, box, strides = [*sizes, results.batch], [*box, 1], [*strides, 2 * results.batch_step]
        return hopper.encode(
            self.maps["c"], tirx.address_of(results.first), str(results.buffer.dtype), sizes, strides, box)

    @property
    def _landing(self) -> int:
        return (self.boxes.pixels + self.tile.block_n) * self.tile.block_k * 2

    def _copy(self, side: str, operand: Any, rows: int, to: Any, at: Any, full: Any) -> list[tirx.Stmt]:
        if operand is not self.image and not self.filled:
            return super()._copy(side, operand, rows, to, at, full)
        batch, row, depth = at
        shares, size = self._shares(operand), rows * hopper.SWIZZLE_BYTES
        if shares > 1:  # this block's part of each box, for all
            part = self.block % shares
            to, row = to + part * (size // shares), row + part * (rows // shares)
        copies = []
        for piece in range(self.tile.block_k // WIDE):
            place, channel = self._place_of(depth // WIDE + piece)
            corner: tuple[Any, ...] = (channel, *self._corner(batch, row, place))
            if operand is self.product.b:
                corner = (channel, place, row, *([batch] if operand.batch > 1 else []))
            copies.append(hopper.fetch_box(to + piece * size, self.maps[side], corner, full, shares))
        return copies

    def _place_of(self, piece: Any) -> tuple[Any, Any]:
        """The place of a window and its first channel that a piece of a row has."""
        image, pieces = self.image, self.image.pieces
        place = piece // pieces
        if image.depth % self.tile.block_k:  # behind the last place there are no channels
            place = tirx.min(place, i32(image.window[0] * image.window[1] - 1))
        return place, (piece - place * pieces) * WIDE

    def _corner(self, batch: Any, row: Any, place: Any) -> tuple[Any, Any, Any]:
        """The column, line and image of the pixel that a row of the tiles has in a place of its window."""
        image, (n, line, column), (lower, further) = self.image, self._pixel(row), self.image.shift(batch)
        down, right = place // image.window[1], place % image.window[1]
        return (column * image.strides[1] - image.pads[1] + further + right * image.dilation[1],
                line * image.strides[0] - image.pads[0] + lower + down * image.dilation[0], n)

    def _pixel(self, row: Any) -> tuple[Any, Any, Any]:
        """The image, line and column of the results that a row of the tiles is, in a box or beyond the last one."""
        (_, lines, columns), (_, wide, narrow) = self.boxes.counts, self.boxes.shape
        box, inside = row // self.tile.block_m, row % self.tile.block_m
        image, line, column = self.boxes.shape
        return (box // (lines * columns) * image + inside // (wide * narrow),
                box // columns % lines * line + inside // narrow % wide, box % columns * column + inside % narrow)

    def _row(self, row: Any) -> tuple[Any, Any]:
        (n, line, column), (images, height, width) = self._pixel(row), self.boxes.results
        there = [n < images, line < height, column < width]
        if self.boxes.pixels < self.tile.block_m:
            there.append(row % self.tile.block_m < self.boxes.pixels)
        return (n * height + line) * width + column, tirx.all(*there)

    def _nearest(self, row: Any) -> Any:
        number, there = self._row(row)
        return tirx.Select(there, number, i32(0))

    def _result_box(self, batch: Any, row: Any, column: Any) -> tuple[Any, ...]:
        place = (column, *reversed(self._pixel(row)))
        return (*place, batch) if self.product.batch > 1 else place
