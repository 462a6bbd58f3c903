"""The device's side of TVM's RPC: registers with a tracker and serves one authenticated session at a time.

TVM's own server lets in whoever the tracker has sent, and the tracker sends anyone. Here the tracker hands out a nonce
instead of the key, fresh for each session, and who connects must show its HMAC with the token (:func:`proof`): who does
not know the token is turned away before a byte of what it sends is interpreted, and what was overheard opens nothing.
What follows is neither encrypted nor signed, so the server binds to the loopback address; from elsewhere one
comes by a tunnel.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import select
import socket
import struct
import subprocess
import sys
import time

from mlc import children
from mlc.config import get
from mlc.errors import MeasureError, UsageError
from mlc.measure.rpc_protocol import LOOPBACK, Tracker, endpoint, proof, receive_exactly

__all__ = ["serve"]

#: seconds between two words with the tracker, and those that a peer has for its handshake
_PERIOD, _HANDSHAKE = 2.0, 5.0
#: periods after which a nonce that was handed out and not used is replaced
_UNUSED = 4
_LONGEST_KEY = 512


def serve(place: str, key: str) -> None:
    """Register at the tracker ``place`` (HOST:PORT) under ``key`` and serve until ended. A tracker that goes is waited
    for. Raises :class:`UsageError` for an address that is not this machine's loopback or a token that is missing, and
    :class:`MeasureError` where no tracker answers at first."""
    host, port = endpoint(place)
    if not get("MLC_TOKEN"):
        raise UsageError("a worker runs code that it is sent, so MLC_TOKEN must hold a secret that runs must know")
    tracker: Tracker | None = Tracker(host, port)
    with socket.create_server((LOOPBACK, 0)) as listener:
        print(f"mlc: worker {key} at port {listener.getsockname()[1]}", file=sys.stderr, flush=True)
        while True:
            try:
                tracker = tracker or Tracker(host, port)
                _serve_one(listener, tracker, key)
            except (OSError, MeasureError):
                if tracker is not None:
                    tracker.close()
                tracker = None
                time.sleep(_PERIOD)


def _serve_one(listener: socket.socket, tracker: Tracker, key: str) -> None:
    """Offer this device once, and serve who comes."""
    port = listener.getsockname()[1]
    tracker.introduce(key, port)
    nonce = f"{key}:{secrets.token_hex(16)}"
    tracker.offer(key, port, nonce)
    unused = 0
    while True:
        readable, _, _ = select.select([listener], [], [], _PERIOD)
        if not readable:
            unused = 0 if nonce in tracker.pending() else unused + 1
            if unused > _UNUSED:  # who was sent here did not come
                return
            continue
        connection, _ = listener.accept()
        with connection:
            admitted = _admitted(connection, key, nonce)
            if admitted:
                _session(connection)
        if admitted or nonce not in tracker.pending():  # what has been handed out is of use to nobody any more
            return


def _admitted(connection: socket.socket, key: str, nonce: str) -> bool:
    """TVM's handshake, with a proof in the place of the key that the tracker handed out."""
    from tvm.rpc import base

    connection.settimeout(_HANDSHAKE)
    try:
        magic, size = struct.unpack("<ii", receive_exactly(connection, 8))
        if magic != base.RPC_MAGIC or not 0 < size <= _LONGEST_KEY:
            return False
        said = receive_exactly(connection, size).decode("ascii", "replace").split()
        if not said or not hmac.compare_digest(said[0].encode(), f"client:{proof(nonce)}".encode()):
            connection.sendall(struct.pack("<i", base.RPC_CODE_MISMATCH))
            return False
        answer = f"server:{key}".encode()
        connection.sendall(struct.pack("<ii", base.RPC_CODE_SUCCESS, len(answer)) + answer)
        connection.settimeout(None)
        return True
    except OSError:
        return False


def _session(connection: socket.socket) -> None:
    """A process of its own, which may crash, speaks with the peer."""
    command = children.command("mlc.measure.rpc_server", str(connection.fileno()))
    with subprocess.Popen(command, pass_fds=[connection.fileno()], env=children.environment()) as process:
        try:
            process.wait()
        finally:
            process.kill()


def _converse(descriptor: int) -> None:
    """Serve TVM's protocol on a connection until the peer closes it."""
    import tvm_ffi
    from tvm.rpc import _ffi_api

    from mlc.measure.node import Node

    node = Node()
    tvm_ffi.register_global_func("mlc.node.describe", node.describe)
    tvm_ffi.register_global_func("mlc.node.run", node.run)
    try:
        _ffi_api.ServerLoop(descriptor)
    finally:
        node.close()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        _converse(int(sys.argv[1]))
    os._exit(0)
