"""Kernels in Hopper's assembly, for the emulator."""

from __future__ import annotations

import numpy as np

from mlc.testing.cuda_emulator import Launch, TensorMap

RNG = np.random.default_rng(0)
WARPGROUP = [Launch((1, 1, 1), (128, 1, 1))]
HEAD = '#endif\nextern "C" __global__ void __launch_bounds__(128) '
SHARED = "extern __shared__ __align__(64) uchar buf[];\n"


def swizzled(rows: np.ndarray) -> np.ndarray:
    """Rows of 128 bytes as 128-byte swizzling keeps them: 16-byte piece c of row r is the piece c XOR r % 8."""
    pieces = rows.reshape(len(rows), 8, -1)
    return np.stack([pieces[r, np.arange(8) ^ r % 8] for r in range(len(rows))]).reshape(rows.shape)


#: a barrier at 0, and a tile at 1024; the first thread makes the one and asks for the other
INIT = 'asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(0u), "r"(1));'
INIT_FENCE = 'asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");'
EXPECT = 'asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(0u), "r"({bytes}) : "memory");'
UNTIL = """int done; do {{ asm volatile("{{\\n.reg .pred p;\\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\\n"
  "selp.b32 %0, 1, 0, p;\\n}}\\n" : "=r"(done) : "r"(0u), "r"({parity}) : "memory"); }} while (!done);"""


def rows_of(x: np.ndarray, wide: int = 64, count: int = 40) -> TensorMap:
    return TensorMap("x", 0, 2, (x.shape[1], x.shape[0]), (2 * x.shape[1],), (wide, count))
