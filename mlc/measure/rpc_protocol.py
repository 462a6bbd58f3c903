"""What both sides of TVM's RPC share: addresses, tracker messages, and the authentication by token."""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
import struct
from typing import Any

from mlc.config import get
from mlc.errors import MeasureError, UsageError

__all__ = [
    "LOOPBACK", "RPC_MAGIC", "RPC_MISMATCH", "RPC_SUCCESS", "Tracker", "endpoint", "proof", "receive_exactly",
]

LOOPBACK = "127.0.0.1"
#: what TVM's data connections and those with its tracker begin with, and the answers of a server
RPC_MAGIC, TRACKER_MAGIC = 0xFF271, 0x2F271
RPC_SUCCESS, RPC_MISMATCH = RPC_MAGIC, RPC_MAGIC + 2
#: of the tracker's messages
_SUCCESS, _PUT, _REQUEST, _UPDATE_INFO, _SUMMARY, _PENDING = 0, 3, 4, 5, 6, 7
_NAMES = (LOOPBACK, "localhost", "::1", "[::1]")
_TIMEOUT = 10.0
_MOST_BYTES = 1 << 24


def endpoint(place: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``; raises :class:`UsageError` unless the host is this machine's loopback."""
    host, _, port = place.rpartition(":")
    if host not in _NAMES:
        raise UsageError(f"TVM's RPC is neither encrypted nor signed, so the tracker must be at {LOOPBACK}, got "
                         f"{host}; make a tunnel to it (ssh -L {port}:{LOOPBACK}:{port} {host}) and give "
                         f"{LOOPBACK}:{port}")
    return host.strip("[]"), int(port)


def proof(nonce: str) -> str:
    """The proof of knowing the token, for one session."""
    return hmac.new(get("MLC_TOKEN").encode(), nonce.encode(), hashlib.sha256).hexdigest()


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    """``size`` bytes; raises :class:`OSError` where the peer sends fewer."""
    data = bytearray()
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("the peer has gone")
        data += part
    return bytes(data)


class Tracker:
    """A connection with TVM's tracker, whose messages are JSON. Raises :class:`MeasureError` where none answers, and
    ``OSError`` where it goes later."""

    def __init__(self, host: str, port: int) -> None:
        try:
            self._socket = socket.create_connection((host, port), _TIMEOUT)
            self._socket.sendall(struct.pack("<i", TRACKER_MAGIC))
            (magic,) = struct.unpack("<i", receive_exactly(self._socket, 4))
        except OSError as error:
            raise MeasureError(f"an RPC tracker must answer at {host}:{port}, but does not "
                               f"({error.strerror or error}); start one with `python -m tvm.exec.rpc_tracker --host "
                               f"{LOOPBACK} --port {port}`") from None
        if magic != TRACKER_MAGIC:
            self._socket.close()
            raise MeasureError(f"an RPC tracker must answer at {host}:{port}, but something else does; give the "
                               "tracker's address")

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()

    def introduce(self, key: str, port: int) -> None:
        """Say which device there is."""
        self._say([_UPDATE_INFO, {"key": f"server:{key}", "addr": [LOOPBACK, port]}])

    def offer(self, key: str, port: int, nonce: str) -> None:
        """Let the next session that asks for ``key`` have this device."""
        self._say([_PUT, key, (port, nonce), LOOPBACK])

    def pending(self) -> list[str]:
        """The nonces of this connection that nobody was given yet."""
        return list(self._say([_PENDING]))

    def request(self, key: str) -> None:
        """Ask for a device; :meth:`granted` has the answer."""
        self._send([_REQUEST, key, "", 0])

    def granted(self) -> tuple[str, int, str]:
        """Host, port and nonce of the device that was asked for; waits as long as the socket's time-out says."""
        code, value = self._receive()
        if code != _SUCCESS:
            raise ConnectionError("the tracker refused the request")
        host, port, nonce = value
        return str(host), int(port), str(nonce)

    def count(self, key: str) -> int:
        """How many devices there are under ``key``, busy ones too."""
        _, summary = self._say([_SUMMARY])
        return sum(info.get("key") == f"server:{key}" for info in summary["server_info"])

    def keys(self) -> list[str]:
        """The keys of all devices."""
        _, summary = self._say([_SUMMARY])
        return sorted({str(info["key"]).removeprefix("server:") for info in summary["server_info"]})

    def fileno(self) -> int:
        return self._socket.fileno()

    def _say(self, message: Any) -> Any:
        self._send(message)
        return self._receive()

    def _send(self, message: Any) -> None:
        data = json.dumps(message).encode()
        self._socket.sendall(struct.pack("<i", len(data)) + data)

    def _receive(self) -> Any:
        (size,) = struct.unpack("<i", receive_exactly(self._socket, 4))
        if not 0 < size <= _MOST_BYTES:
            raise ConnectionError(f"a message of {size} bytes")
        try:
            return json.loads(receive_exactly(self._socket, size))
        except ValueError as error:
            raise ConnectionError("a message that is not JSON") from error
