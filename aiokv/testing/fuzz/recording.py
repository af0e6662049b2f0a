"""Genuine frames of each kind, recorded from transfer tables that talk to each other."""

from __future__ import annotations

import msgspec

from aiokv.errors import TransferAborted
from aiokv.proto.layout import CacheLayout, GroupLayout
from aiokv.proto.messages import Bye, Frame, Message, Reset, encode_frame, encode_message
from aiokv.proto.settings import SECOND
from aiokv.testing.tables import LAYOUT, Member, Net

__all__ = ["LAYOUTS", "genuine_frames"]

#: Of the recorded engines: plain; with another order of axes; K and V split; a window beside full
#: attention; latent vectors; and blocks of other sizes.
LAYOUTS = (
    LAYOUT,
    CacheLayout(groups=(msgspec.structs.replace(LAYOUT.groups[0], axes="bhtsd"),), model=b"m"),
    CacheLayout(groups=(msgspec.structs.replace(LAYOUT.groups[0], axes="bthd", split=True),), model=b"m"),
    CacheLayout(
        groups=(
            GroupLayout((0, 2), 16, 4, (0, 2), 2, 8, "float16"),
            GroupLayout((1, 3), 8, 8, (0, 2), 2, 8, "float16", kind="window", window=8),
        ),
        model=b"m",
    ),
    CacheLayout(
        groups=(GroupLayout((0, 1), 8, 8, (0, 1), 1, 36, "bfloat16", "btd", kind="mla"),), model=b"m"
    ),
    CacheLayout.attention(layers=4, blocks=8, block_size=8, heads=4, head_size=8, dtype="uint8", model=b"m"),
)


class _Recorder(Net):
    """Keeps a copy of every frame that it carries."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: list[bytes] = []

    def carry(self, most: int | None = None) -> int:
        """Carry frames, and note what is under way."""
        for way, frames in self.wire.items():
            if way not in self.held:
                self.frames += frames
        return super().carry(most)


def genuine_frames() -> list[bytes]:
    """Frames of sessions that go well and of such that don't; the same ones each time."""
    net = _Recorder()
    a, b = net.add("a"), net.add("b")
    for number, (one_sided, push) in enumerate([(True, False), (True, True), (False, False), (False, True)]):
        b.one_sided = one_sided
        _move(net, a, b, f"t{number}", push=push)
    _give_up(net, a, b)
    _halves(net, b)
    for number, layout in enumerate(LAYOUTS):
        c, d = net.add(f"c{number}", layout), net.add(f"d{number}", layout)
        _move(net, c, d, "u", push=False)
    # An engine of another layout is told that it doesn't fit.
    stranger = net.members[f"d{len(LAYOUTS) - 2}"]
    stranger.fetch("mismatch", sources=[a])
    a.offer("mismatch", to=[stranger])
    net.run()
    return [*net.frames, *_by_hand(net.frames[0])]


def _move(net: Net, producer: Member, consumer: Member, tid: str, *, push: bool) -> None:
    offer = producer.offer(tid, [0, 1], to=[consumer] if push else [])
    fetch = consumer.fetch(tid, [2, 3], sources=[] if push else [producer])
    net.run()
    for layer in range(producer.table.ledger.layout.layers):
        producer.ready(offer, layer)
        net.run()
        net.wait(SECOND // 2)
    consumer.land(fetch)
    net.run()


def _give_up(net: Net, a: Member, b: Member) -> None:
    for number, member in enumerate((a, b)):
        tid = f"given up {number}"
        offer, fetch = a.offer(tid), b.fetch(tid, sources=[a])
        net.run()
        a.ready(offer, 0)
        net.run()
        member.abort(offer if member is a else fetch, TransferAborted("enough"))
        net.run()
    b.fetch("never offered", sources=[a], deadline=2)
    b.fetch("t0", sources=[a], attempt=1, deadline=1)
    b.fetch("t1", tokens=4, first_token=4, sources=[a], attempt=2)
    a.offer("t1", [5], attempt=2)
    net.run()
    for _ in range(8):
        net.wait(SECOND // 2)


def _halves(net: Net, b: Member) -> None:
    """One reader of two producers, each with half of the heads."""
    b.one_sided = True
    low, high = net.add("low", heads=(0, 2)), net.add("high", heads=(2, 4))
    offers = [(each, each.offer("halves")) for each in (low, high)]
    fetch = b.fetch("halves", sources=[low, high], parts=2)
    net.run()
    for each, offer in offers:
        each.ready(offer)
    net.run()
    b.land(fetch)
    net.run()


def _by_hand(like: bytes) -> list[bytes]:
    """What tables alone don't say."""
    frame = msgspec.msgpack.decode(like, type=Frame)
    messages: tuple[Message, ...] = (Bye("closed"), Reset(1, "session", "this session is not known here"))
    return [
        encode_frame(msgspec.structs.replace(frame, body=[msgspec.Raw(encode_message(message))]))
        for message in messages
    ]
