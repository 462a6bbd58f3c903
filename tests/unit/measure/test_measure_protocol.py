"""Messages in pieces, and what is no message."""

from __future__ import annotations

import json
import os
import struct

import pytest

from mlc.measure.protocol import Broken, MessageReader, send


@pytest.fixture
def pipe():
    receive, give = os.pipe()
    yield receive, give
    for fd in (receive, give):
        try:
            os.close(fd)
        except OSError:
            continue


def test_messages_arrive_whole_and_in_order(pipe) -> None:
    receive, give = pipe
    reader, first, second = MessageReader(receive), {"text": "ünï", "n": 1.5}, {"list": [1, None, True]}
    send(give, first)
    assert reader.receive() == first
    send(give, second)
    assert reader.wait() == second


def test_a_message_in_pieces(pipe) -> None:
    receive, give = pipe
    reader, body = MessageReader(receive), json.dumps({"a": "b" * 100}).encode()
    data = struct.pack(">I", len(body)) + body
    for piece in (data[:2], data[2:7], data[7:-1]):
        os.write(give, piece)
        assert reader.receive() is None
    os.write(give, data[-1:])
    assert reader.receive() == {"a": "b" * 100}


@pytest.mark.parametrize("data", [b"\x00\x00\x00\x02{]", b"\x00\x00\x00\x02[]", b"\xff\xff\xff\xff{}", b""])
def test_garbage_and_the_end_are_broken(pipe, data: bytes) -> None:
    receive, give = pipe
    os.write(give, data)
    os.close(give)
    with pytest.raises(Broken):
        MessageReader(receive).wait()


def test_nobody_listens(pipe) -> None:
    receive, give = pipe
    os.close(receive)
    with pytest.raises(Broken):
        send(give, {"a": 1})
