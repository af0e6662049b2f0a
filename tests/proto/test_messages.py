"""Messages: what goes comes back, old frames stay readable, and nothing malformed gets through."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aiokv.errors import RemoteProtocolError
from aiokv.proto.layout import CacheLayout, GroupLayout
from aiokv.proto.messages import (
    OLDEST_VERSION,
    VERSION,
    Abort,
    Aborted,
    Accept,
    Bye,
    Frame,
    Grant,
    Hello,
    Landed,
    Message,
    Offer,
    Ping,
    Pong,
    Ready,
    Refuse,
    Renew,
    Reset,
    as_text,
    decode_frame,
    decode_messages,
    encode_frame,
    encode_message,
    pack_blocks,
    unpack_blocks,
)
from aiokv.proto.placement import Placement
from aiokv.proto.plan import GroupBlocks

LAYOUT = CacheLayout(
    groups=(
        GroupLayout(
            layers=(0, 2),
            blocks=300,
            block_size=16,
            heads=(0, 2),
            total_heads=8,
            head_size=64,
            dtype="bfloat16",
        ),
        GroupLayout(
            layers=(1,),
            blocks=40,
            block_size=4,
            heads=(0, 1),
            total_heads=1,
            head_size=10,
            dtype="uint8",
            axes="btd",
            kind="mla",
        ),
    ),
    model=b"\x01\xff",
)

#: One of each message, with every field set.
MESSAGES: dict[str, Message] = {
    "hello": Hello(
        (1, 1),
        "tcp://10.0.0.7:5000",
        LAYOUT,
        Placement.dense(LAYOUT),
        {"shm": b"\x00door"},
        "tcp://localhost:4000",
    ),
    "ping": Ping(),
    "pong": Pong(2**61),
    "bye": Bye("gone for lunch"),
    "reset": Reset(7, "session", "this session is not known here"),
    "offer": Offer("request-1", 2, 30_000_000, "00-aa-bb-01"),
    "grant": Grant(
        "request-1",
        2,
        29_999_999,
        "tcp",
        b"link",
        16,
        -1,
        ((0, 2), (0, 0)),
        ((0, b"\x01\0\0\0"), (16, b"")),
        "00-aa-bb-01",
    ),
    "accept": Accept(
        "request-1", 2, 100, ((0, b"\x02\0\0\0\x03\0\0\0"), (0, b"")), b"\x05", 1_234_567_890_123, True
    ),
    "ready": Ready("request-1", 2, b"\x07"),
    "landed": Landed("request-1", 2),
    "refuse": Refuse("request-1", 2, "producer", "ended", "the offer landed"),
    "abort": Abort("request-1", 2, "consumer", "deadline", "too late"),
    "aborted": Aborted("request-1", 2, "producer"),
    "renew": Renew("request-1", 2),
}


def golden(version: int) -> dict[str, str]:
    text = Path(__file__).with_name(f"golden_v{version}.txt").read_text("ascii")
    return dict(line.split() for line in text.splitlines())


#: Frames of protocol version 1, as its first release wrote them: a line each, the name and the bytes.
GOLDEN = golden(1)
#: The same of those messages that version 2 has besides, or writes otherwise.
GOLDEN_2 = golden(2)


def frame(*messages: Message, **changes: object) -> Frame:
    body = [msgspec.Raw(encode_message(message)) for message in messages]
    made = Frame(b"s" * 16, b"d" * 16, "tcp://10.0.0.7:5000", 3, 4, 5, 6, body)
    return msgspec.structs.replace(made, **changes)


def through(message: Message) -> Message:
    (back,) = decode_messages(decode_frame(encode_frame(frame(message))))
    return back


# -- what goes comes back ---------------------------------------------------------------------------


def test_there_is_a_sample_of_each_message() -> None:
    assert {type(message) for message in MESSAGES.values()} == set(Message.__args__)


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_comes_back_as_it_was(name: str) -> None:
    assert through(MESSAGES[name]) == MESSAGES[name]


def test_a_frame_keeps_its_header_and_the_order_of_its_messages() -> None:
    sent = frame(*MESSAGES.values())
    back = decode_frame(encode_frame(sent))
    for field in ("src", "dst", "reply", "mine", "yours", "seq", "ack"):
        assert getattr(back, field) == getattr(sent, field)
    assert decode_messages(back) == list(MESSAGES.values())


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("name", MESSAGES)
def test_frames_of_all_versions_stay_readable_for_ever(name: str, version: int) -> None:
    # If this fails, the protocol has changed: give it a new version, and keep reading this one.
    assert OLDEST_VERSION == 1
    data = (GOLDEN if version == 1 else GOLDEN | GOLDEN_2).get(name)
    if data is None:
        return  # version 1 has no such message
    read = decode_frame(bytes.fromhex(data))
    meant = MESSAGES[name]
    if version == 1 and isinstance(meant, Accept):
        meant = msgspec.structs.replace(meant, more=False)
    assert decode_messages(read) == [meant]
    assert (read.src, read.dst, read.reply) == (b"s" * 16, b"d" * 16, "tcp://10.0.0.7:5000")
    assert (read.mine, read.yours, read.seq, read.ack) == (3, 4, 5, 6)


@pytest.mark.parametrize("name", MESSAGES)
def test_frames_are_written_as_version_2_says(name: str) -> None:
    assert VERSION == 2
    assert encode_frame(frame(MESSAGES[name])).hex() == {**GOLDEN, **GOLDEN_2}[name]


def test_a_later_version_may_add_fields_to_a_message() -> None:
    longer = msgspec.msgpack.encode([2, "added", {"later": 1}])
    assert decode_messages(frame(body=[msgspec.Raw(longer)])) == [Ping()]


def test_a_later_version_may_add_fields_to_the_header() -> None:
    fields = msgspec.msgpack.decode(encode_frame(frame(Ping())))
    assert decode_frame(msgspec.msgpack.encode([*fields, "added"])).seq == 5


# -- bounds -----------------------------------------------------------------------------------------

COUNT, TIME = 2**48, 2**62

OUT_OF_BOUNDS: list[tuple[str, str, object]] = [
    ("hello", "address", "x" * 257),
    ("hello", "transports", {"x" * 65: b""}),
    ("hello", "transports", {"shm": b"x" * 4097}),
    ("pong", "lease", -1),
    ("pong", "lease", TIME),
    ("bye", "text", "x" * 2049),
    ("reset", "stream", -1),
    ("reset", "stream", COUNT),
    ("reset", "reason", "x" * 65),
    ("reset", "text", "x" * 2049),
    ("offer", "tid", ""),
    ("offer", "tid", "x" * 257),
    ("offer", "attempt", -1),
    ("offer", "attempt", COUNT),
    ("offer", "remaining_us", -1),
    ("offer", "remaining_us", TIME),
    ("offer", "trace", "x" * 65),
    ("grant", "tid", ""),
    ("grant", "attempt", COUNT),
    ("grant", "remaining_us", TIME),
    ("grant", "link", "x" * 65),
    ("grant", "link_id", b"x" * 65),
    ("grant", "first_token", -1),
    ("grant", "first_token", COUNT),
    ("grant", "tokens", -2),
    ("grant", "tokens", COUNT),
    ("grant", "heads", ((-1, 0),)),
    ("grant", "heads", ((0, COUNT),)),
    ("grant", "heads", ((0, 1, 2),)),
    ("grant", "blocks", ((-1, b""),)),
    ("grant", "blocks", ((0, "text"),)),
    ("grant", "trace", "x" * 65),
    ("accept", "tokens", -1),
    ("accept", "tokens", COUNT),
    ("accept", "ready", b"x" * 1025),
    ("accept", "lease", -1),
    ("accept", "lease", TIME),
    ("accept", "more", 1),
    ("ready", "ready", b"x" * 1025),
    ("ready", "attempt", 1.5),
    ("landed", "tid", None),
    ("landed", "attempt", True),
    ("refuse", "role", "router"),
    ("refuse", "reason", "x" * 65),
    ("refuse", "text", "x" * 2049),
    ("abort", "role", ""),
    ("abort", "reason", "x" * 65),
    ("abort", "text", "x" * 2049),
    ("aborted", "role", "Producer"),
    ("renew", "tid", ""),
    ("renew", "attempt", COUNT),
]


@pytest.mark.parametrize(("name", "field", "value"), OUT_OF_BOUNDS)
def test_a_field_out_of_bounds_is_refused(name: str, field: str, value: object) -> None:
    with pytest.raises(RemoteProtocolError, match="malformed message"):
        through(msgspec.structs.replace(MESSAGES[name], **{field: value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("src", b"x" * 15),
        ("src", b"x" * 17),
        ("dst", b"x" * 17),
        ("reply", "x" * 257),
        ("mine", -1),
        ("mine", COUNT),
        ("yours", COUNT),
        ("seq", COUNT),
        ("ack", -1),
        ("body", [msgspec.Raw(b"\x01")] * 65_537),
        ("body", msgspec.Raw(b"\x01")),
    ],
)
def test_a_header_out_of_bounds_is_refused(field: str, value: object) -> None:
    with pytest.raises(RemoteProtocolError, match="not a frame"):
        decode_frame(encode_frame(frame(**{field: value})))


def test_what_no_cache_can_be_is_refused_in_a_hello() -> None:
    fields = msgspec.msgpack.decode(encode_message(MESSAGES["hello"]))
    fields[3][0][0][1] = 0  # blocks of the first group
    with pytest.raises(RemoteProtocolError, match="blocks must be positive"):
        decode_messages(frame(body=[msgspec.Raw(msgspec.msgpack.encode(fields))]))


@pytest.mark.parametrize("tag", [0, 6, 9, 19, 99, -1, "ping", None])
def test_an_unknown_message_is_refused(tag: object) -> None:
    with pytest.raises(RemoteProtocolError, match="malformed message"):
        decode_messages(frame(body=[msgspec.Raw(msgspec.msgpack.encode([tag]))]))


# -- anything at all --------------------------------------------------------------------------------

SAMPLES = [encode_frame(frame(message)) for message in MESSAGES.values()]


def read(data: bytes) -> None:
    """Read it as an engine does; only a RemoteProtocolError may come out."""
    try:
        decode_messages(decode_frame(data))
    except RemoteProtocolError:
        return


@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_else(data: bytes) -> None:
    read(data)


@given(st.sampled_from(SAMPLES), st.data())
def test_a_damaged_frame_raises_nothing_else(sample: bytes, data: st.DataObject) -> None:
    damaged = bytearray(sample)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    read(bytes(damaged[: data.draw(st.integers(0, len(damaged)))]))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@given(st.integers(0, 19), st.lists(VALUES, max_size=11))
def test_a_message_of_anything_raises_nothing_else(tag: int, fields: list[object]) -> None:
    read(encode_frame(frame(body=[msgspec.Raw(msgspec.msgpack.encode([tag, *fields]))])))


@pytest.mark.parametrize("opening", [b"\x91", b"\xdc\x00\x01", b"\x81\xa1k", b"\x81"])
@pytest.mark.parametrize("where", ["frame", "header", "message", "field"])
def test_a_frame_nested_beyond_reason_raises_nothing_else(opening: bytes, where: str) -> None:
    deep = opening * 200_000 + b"\xc0"
    header = encode_frame(frame())[1:-1]
    ping = encode_message(Ping())
    data = {
        "frame": deep,
        "header": b"\x99" + header + b"\x90" + deep,
        "message": b"\x98" + header + b"\x91" + deep,
        "field": b"\x98" + header + b"\x91\x92" + ping[1:] + deep,
    }[where]
    read(data)


# -- block lists ------------------------------------------------------------------------------------


def lists(*groups: list[int], start: int = 0) -> tuple[GroupBlocks, ...]:
    return tuple(GroupBlocks(start, np.array(ids, dtype=np.int64)) for ids in groups)


@given(st.lists(st.integers(0, 299)), st.lists(st.integers(0, 39)))
@example([], [])
def test_block_lists_come_back_as_they_were(first: list[int], second: list[int]) -> None:
    back = unpack_blocks(pack_blocks(lists(first, second, start=32)), LAYOUT)
    assert [group.ids.tolist() for group in back] == [first, second]
    assert [group.start for group in back] == [32, 32]
    assert all(group.ids.dtype == np.int64 for group in back)


@pytest.mark.parametrize(
    ("packed", "message"),
    [
        ((), "0 groups, not 2"),
        (((0, b""),), "1 groups, not 2"),
        (((0, b""),) * 3, "3 groups, not 2"),
        (((0, b"\0\0\0"), (0, b"")), "block list of group 0"),
        (((0, b""), (0, b"\0" * 5)), "block list of group 1"),
        (((8, b""), (0, b"")), "block list of group 0"),
        (((0, b""), (2, b"")), "block list of group 1"),
        (((0, b"\x2c\x01\0\0"), (0, b"")), "group 0: block 300 of a cache with 300"),
        (((0, b""), (0, b"\0\0\0\0\xff\xff\xff\xff")), "group 1: block 4294967295 of a cache with 40"),
    ],
)
def test_block_lists_that_cannot_be_meant_are_refused(packed: tuple, message: str) -> None:
    with pytest.raises(RemoteProtocolError, match=message):
        unpack_blocks(packed, LAYOUT)


@pytest.mark.parametrize(
    "reason", ["x" * 5000, "no file '\udcff'", OSError(2, "gone", "\ud800"), "\U0001f600" * 3000]
)
def test_a_reason_of_any_text_can_be_said(reason: object) -> None:
    said = Abort("t", 0, "producer", "failed", as_text(reason))
    (heard,) = decode_messages(Frame(b"x" * 16, b"", "a", 1, 0, 1, 0, [msgspec.Raw(encode_message(said))]))
    assert heard == said
