"""One session of TVM's RPC, in a process of its own: ``python -m mlc.measure.rpc_session DESCRIPTOR``.

The descriptor is that of a connection whose peer has been admitted.
"""

from __future__ import annotations

import contextlib
import os
import sys

__all__ = ["converse"]


def converse(descriptor: int) -> None:
    """Serve TVM's protocol on a connection until the peer closes it."""
    import tvm_ffi

    from mlc import runtime
    from mlc.measure.board import Board

    serve_until_closed = runtime.function("rpc.ServerLoop")
    board = Board()
    for name in ("describe", "missing", "put", "run"):
        tvm_ffi.register_global_func(f"mlc.board.{name}", getattr(board, name))
    try:
        serve_until_closed(descriptor)
    finally:
        board.close()


if __name__ == "__main__":
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # tvm_ffi would import it, for nothing
    with contextlib.suppress(KeyboardInterrupt):
        converse(int(sys.argv[1]))
    os._exit(0)
