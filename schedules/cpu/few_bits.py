"""Register tiles of products with low-bit weights: extents, and the tiles to choose from."""

from __future__ import annotations

from dataclasses import dataclass

from schedules.cpu.tiling import divisors
from schedules.machine import CpuMachine

__all__ = ["FewBits", "chunks", "heights", "widths"]

#: the tallest and the widest register tile, in rows and vectors
_MAX_ROWS, _MAX_VECTORS = 12, 8


@dataclass(frozen=True)
class FewBits:
    """``[rows, K] x [K, columns]``: a sum of ``blocks``, each of ``steps`` words of ``fields`` integers; panels have
    ``panel`` columns."""

    rows: int
    columns: int
    blocks: int
    steps: int
    fields: int
    panel: int
    taken: int = 1  # products of one instruction's lane

    @property
    def item(self) -> int:
        """Bytes of an activation."""
        return 4 // self.taken

    @property
    def depth(self) -> int:
        return self.blocks * self.steps * self.fields


def heights(shape: FewBits) -> list[int]:
    """Tile heights: those that divide the rows, and for each number of tiles the lowest."""
    lowest = {-(-shape.rows // tiles) for tiles in range(-(-shape.rows // _MAX_ROWS), shape.rows + 1)}
    return sorted({*divisors(shape.rows, _MAX_ROWS), *lowest, *range(1, min(shape.rows, _MAX_ROWS) + 1)})


def widths(shape: FewBits, machine: CpuMachine) -> list[int]:
    """Tile widths: whole vectors of a panel, or whole panels."""
    lanes = min(machine.lanes(), shape.panel)
    found = {*(lanes * v for v in divisors(shape.panel // lanes, _MAX_VECTORS)),
             *(shape.panel * p for p in divisors(shape.columns // shape.panel, _MAX_VECTORS))}
    return sorted(n for n in found if n <= lanes * _MAX_VECTORS)


def chunks(shape: FewBits, machine: CpuMachine, m: int, n: int) -> list[tuple[int, int, int, int]]:
    """``(mb, nb, order, inner)``: rows that stay in the second cache while the weight streams past them, all of them
    where they do; and chunks enough for the cores."""
    tiles, columns = -(-shape.rows // m), shape.columns // n
    room = machine.l2_bytes * 3 // 4
    mb = max(d for d in divisors(tiles, 64) if d == 1 or d * m * shape.depth * shape.item <= room)
    found = []
    for wanted in (4 * machine.cores, machine.cores, 16 * machine.cores):
        nb = max((d for d in divisors(columns, 64) if columns // d >= min(wanted, columns)), default=1)
        if (mb, nb, 1, 1) not in found:
            found.append((mb, nb, 1, 1))
    return found
