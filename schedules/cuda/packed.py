"""How weights of 2, 4 or 8 bits lie in a GPU's memory: in the order in which fragments of tensor cores take them.

A weight matrix ``[N, K]`` (its rows are columns of the product) lies in tiles of 16 columns by as many numbers along
``k`` as a warp fetches by one access of 16 bytes a lane. Lane ``4g + t`` has the columns ``g`` and ``g + 8``, two
32-bit words of each, which is what it holds of the operand A of ``mma.m16n8k16`` (PTX ISA, "Warp Level Matrix
Multiply-Accumulate Instructions"). A sum may be taken in any order: so the numbers that a lane has of an instruction
are neighbours along ``k``, and what it needs of the activations is one access too.

In a word, neighbours lie 16 bits apart: a mask leaves a pair of them, as integers in both halves of a register, where
the bits of an exponent make 16-bit floats of them (Kim et al., "Who Says Elephants Can't Run: Bringing Large Scale MoE
Models into Cloud Scale Production", 2022). That weights are stored as fragments is from Frantar et al., "MARLIN:
Mixed-Precision Auto-Regressive Parallel Inference on Large Language Models", 2024.

Scales, and zero points, of a lane's columns and of the blocks in a tile are neighbours as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

__all__ = ["BITS", "COLUMNS", "LANES", "STEP", "WORDS", "Packing"]

#: columns of a tile, lanes that share it, 32-bit words of a lane, and the numbers along ``k`` of an instruction
COLUMNS, LANES, WORDS, STEP = 16, 32, 4, 16
BITS = (2, 4, 8)
#: neighbours along ``k`` that a lane has at most: two instructions', and 16 bytes of activations of 16 bits
_LONGEST_RUN = 8


@dataclass(frozen=True)
class Packing:
    """Of a matrix of so many ``columns`` and ``depth`` numbers in each, of which every ``block`` has a scale."""

    bits: int
    block: int
    columns: int
    depth: int

    @property
    def misfit(self) -> str | None:
        """Why there is no such packing, or None: an instruction's numbers must have one scale."""
        if self.bits not in BITS:
            return f"numbers must have 2, 4 or 8 bits, got {self.bits}"
        if self.blocks > 1 and self.block % STEP:
            return f"blocks of several must be multiples of {STEP} numbers, got {self.block}"
        return None

    @property
    def blocks(self) -> int:
        """Scales of a column."""
        return -(-self.depth // self.block)

    @property
    def per_word(self) -> int:
        return 32 // self.bits

    @property
    def held(self) -> int:
        """Numbers that a lane has of a column in a tile."""
        return 2 * self.per_word

    @property
    def tile_depth(self) -> int:
        return 4 * self.held

    @property
    def run(self) -> int:
        """Neighbours along ``k`` of a lane: as many as lanes can have of one block."""
        return _LONGEST_RUN if self.blocks == 1 or self.block % (4 * _LONGEST_RUN) == 0 else STEP // 4

    @property
    def granule(self) -> int:
        """Numbers along ``k`` of a tile that surely have one scale."""
        return self.tile_depth if self.blocks == 1 else gcd(self.block, self.tile_depth)

    @property
    def granules(self) -> int:
        """Of a tile."""
        return self.tile_depth // self.granule

    @property
    def together(self) -> int:
        """Blocks whose scales lie together: those of a tile, where all of them begin and end in it."""
        return self.granules if self.block == self.granule else 1

    @property
    def tiles(self) -> tuple[int, int]:
        """Along columns and along ``k``."""
        return -(-self.columns // COLUMNS), -(-self.depth // self.tile_depth)

    @property
    def words_shape(self) -> tuple[int, int, int, int]:
        return (*self.tiles, LANES, WORDS)

    @property
    def scales_shape(self) -> tuple[int, int, int, int, int]:
        """Tiles of columns, groups of blocks, ``g``, blocks of a group, and a lane's two columns."""
        return self.tiles[0], -(-self.blocks // self.together), COLUMNS // 2, self.together, 2

    def place(self, column: Any, k: Any) -> tuple[list[Any], Any]:
        """Where a number lies: the indices of its word, and the bit in it that it begins at; of arrays too."""
        within, run = k % self.tile_depth, self.run
        lane = column % 8 * 4 + within % (4 * run) // run
        number = within // (4 * run) * run + within % run
        word = column % COLUMNS // 8 * 2 + number // self.per_word
        inside = number % self.per_word
        bit = inside % 2 * 16 + inside // 2 * self.bits
        return [column // COLUMNS, k // self.tile_depth, lane, word], bit

    def scale_place(self, column: Any, block: Any) -> list[Any]:
        """Where the scale of a column's block lies; of arrays too."""
        return [column // COLUMNS, block // self.together, column % 8, block % self.together, column % COLUMNS // 8]
