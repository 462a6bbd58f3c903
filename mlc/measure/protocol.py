"""Messages between the measurer and its workers: length-prefixed JSON over pipes.

JSON, so that whatever a candidate does to its worker, reading the worker's words executes nothing.
"""

from __future__ import annotations

import json
import os
import struct
from typing import Any

__all__ = ["Broken", "MessageReader", "send"]

Message = dict[str, Any]

_LENGTH = struct.Struct(">I")
_MAX_MESSAGE = 256 * 1024 * 1024


class Broken(Exception):
    """The other end is gone, or what it sent is no message."""


def send(fd: int, message: Message) -> None:
    """Write a whole message; raises :class:`Broken` where nobody reads."""
    data = json.dumps(message).encode()
    data = _LENGTH.pack(len(data)) + data
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError as error:
        raise Broken(str(error)) from error


class MessageReader:
    """Puts the pieces together that arrive on ``fd``."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._buffer = bytearray()

    def receive(self) -> Message | None:
        """Read what is there once; the message if it is complete now, else None. Raises :class:`Broken`."""
        try:
            data = os.read(self._fd, 1 << 20)
        except OSError as error:
            raise Broken(str(error)) from error
        if not data:
            raise Broken("end of file")
        self._buffer += data
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > _MAX_MESSAGE:
            raise Broken(f"a message of {length} bytes")
        if len(self._buffer) < _LENGTH.size + length:
            return None
        body = bytes(self._buffer[_LENGTH.size : _LENGTH.size + length])
        del self._buffer[: _LENGTH.size + length]
        try:
            message = json.loads(body)
        except ValueError as error:
            raise Broken("a message that is not JSON") from error
        if not isinstance(message, dict):
            raise Broken("a message that is no object")
        return message

    def wait(self) -> Message:
        """Block until a message is complete."""
        while (message := self.receive()) is None:
            pass
        return message
