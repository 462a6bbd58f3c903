"""The device's RPC server: registers with a tracker and serves one authenticated session at a time.

TVM's own server lets in whoever the tracker has sent, and the tracker sends anyone. Here the tracker hands out a nonce
instead of the key, fresh for each session, and who connects must show its HMAC with the token (:func:`proof`): who does
not know the token is turned away before a byte of what it sends is interpreted, and what was overheard opens nothing.
What follows is neither encrypted nor signed, so the server binds to the loopback address; from elsewhere one
comes by a tunnel.

``python -m mlc.measure.rpc_server HOST:PORT/KEY`` is ``mlc worker --rpc`` where nothing but that is installed.
What is imported here, and by the processes that are started, is numpy, ``tvm_ffi`` and TVM's runtime library:
candidates are built where the session runs (:mod:`mlc.measure.export`), and only run here (:mod:`mlc.measure.board`).
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import select
import socket
import struct
import subprocess
import sys
import time

from mlc import subprocesses
from mlc.config import get
from mlc.errors import MeasureError, MlcError, UsageError
from mlc.measure.executors import parse
from mlc.measure.rpc_protocol import (
    LOOPBACK,
    RPC_MAGIC,
    RPC_MISMATCH,
    RPC_SUCCESS,
    Tracker,
    endpoint,
    proof,
    receive_exactly,
)

__all__ = ["main", "serve"]

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
    tracker = Tracker(host, port)
    with socket.create_server((LOOPBACK, 0)) as listener:
        print(f"mlc: worker {key} at port {listener.getsockname()[1]}", file=sys.stderr, flush=True)
        worker = _Worker((host, port), key, listener, tracker)
        while True:
            try:
                worker.serve_one()
            except (OSError, MeasureError):
                worker.lose_tracker()
                time.sleep(_PERIOD)


class _Worker:
    def __init__(self, place: tuple[str, int], key: str, listener: socket.socket, tracker: Tracker) -> None:
        self._place, self._key, self._listener = place, key, listener
        self._port = int(listener.getsockname()[1])
        self._tracker: Tracker | None = tracker
        tracker.introduce(key, self._port)

    def serve_one(self) -> None:
        """Offer this device once, and serve who comes. Raises what :class:`Tracker` does."""
        tracker = self._known()
        nonce = f"{self._key}:{secrets.token_hex(16)}"
        tracker.offer(self._key, self._port, nonce)
        unused = 0
        while True:
            readable, _, _ = select.select([self._listener], [], [], _PERIOD)
            if not readable:
                unused = 0 if nonce in tracker.pending() else unused + 1
                if unused > _UNUSED:  # who was sent here did not come
                    return
                continue
            connection, _ = self._listener.accept()
            with connection:
                admitted = _admitted(connection, self._key, nonce)
                if admitted:
                    self._session(connection)
            if admitted or nonce not in tracker.pending():  # what has been handed out is of use to nobody any more
                return

    def lose_tracker(self) -> None:
        """Look for it anew."""
        if self._tracker is not None:
            self._tracker.close()
            self._tracker = None

    def _known(self) -> Tracker:
        """The tracker, which knows this device."""
        if self._tracker is None:
            tracker = Tracker(*self._place)
            tracker.introduce(self._key, self._port)
            self._tracker = tracker
        return self._tracker

    def _session(self, connection: socket.socket) -> None:
        """A process of its own, which may crash, speaks with the peer. A tracker that comes anew is told of this device
        meanwhile."""
        command = subprocesses.command("mlc.measure.rpc_session", str(connection.fileno()))
        with subprocess.Popen(command, pass_fds=[connection.fileno()], env=subprocesses.environment()) as process:
            try:
                while True:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(_PERIOD)
                        return
                    try:
                        self._known().pending()
                    except (OSError, MeasureError):
                        self.lose_tracker()
            finally:
                process.kill()


def _admitted(connection: socket.socket, key: str, nonce: str) -> bool:
    """TVM's handshake, with a proof in the place of the key that the tracker handed out."""
    connection.settimeout(_HANDSHAKE)
    try:
        magic, size = struct.unpack("<ii", receive_exactly(connection, 8))
        if magic != RPC_MAGIC or not 0 < size <= _LONGEST_KEY:
            return False
        said = receive_exactly(connection, size).decode("ascii", "replace").split()
        if not said or not hmac.compare_digest(said[0].encode(), f"client:{proof(nonce)}".encode()):
            connection.sendall(struct.pack("<i", RPC_MISMATCH))
            return False
        answer = f"server:{key}".encode()
        connection.sendall(struct.pack("<ii", RPC_SUCCESS, len(answer)) + answer)
        connection.settimeout(None)
        return True
    except OSError:
        return False


def main(arguments: list[str]) -> int:
    """Serve as the arguments say, ``HOST:PORT/KEY``; 1 with a line on standard error where that is impossible."""
    try:
        address = parse(f"rpc://{''.join(arguments)}")
        assert address is not None
        serve(address.place, address.name)
    except MlcError as error:
        print(f"mlc: error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("mlc: error: interrupted", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
