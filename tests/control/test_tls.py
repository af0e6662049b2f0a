"""TLS on the stream channel, and those whom it keeps out."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
import shutil
import ssl
import tempfile
from pathlib import Path

import pytest

from aiokv.control import accepted, streamport
from aiokv.control.base import MAX_FRAME
from aiokv.control.streams import StreamChannel
from aiokv.control.tls import Tls
from aiokv.control.wire import GREETING, pack
from aiokv.testing.conformance.channelkit import Inbox

CERTIFICATES = Path(__file__).parent / "certificates"
#: The key of nothing; its pass phrase is "test".
ENCRYPTED = """\
-----BEGIN ENCRYPTED PRIVATE KEY-----
MIHsMFcGCSqGSIb3DQEFDTBKMCkGCSqGSIb3DQEFDDAcBAhhy8U3QnY2fAICCAAw
DAYIKoZIhvcNAgkFADAdBglghkgBZQMEAQIEEMFCwZDl4JU4cx0vaBn99KgEgZAz
5OqnZHYq1LwvTIVi3VHhx1/JfdebbUDTeTiCZOTH1HsbfSjDSnf5DWZ6hlGXhL8v
Kv4ZHBqdbFzk7BzZZe3dCxJ9bW2xzmdKNhqP/ERj8K1JwaevsfYsv3FGrO/53zJQ
H+pIDruqpU0vdFoaNX4R2qZM1ZVSXrDJmjtLVrK/wSdbCJA33UiSpptSzxvG5EQ=
-----END ENCRYPTED PRIVATE KEY-----
"""
HERE = "tls://127.0.0.1:0"


@functools.cache
def tls_of(name, *, ca="ca.pem", **options):
    with tempfile.TemporaryDirectory() as private:  # anybody can read a checkout
        key = Path(shutil.copy(CERTIFICATES / f"{name}.key", private))
        key.chmod(0o600)
        return Tls.load(CERTIFICATES / f"{name}.pem", key, ca=CERTIFICATES / ca, **options)


for each in ("a", "b", "stranger"):  # files are not for running loops
    tls_of(each)
tls_of("stranger", ca="stranger.pem")


@contextlib.asynccontextmanager
async def channels(*kinds, **options):
    """A started channel for each ``Tls``, with its address and what it gets."""
    ends = []
    try:
        for tls in kinds:
            channel, inbox = StreamChannel(HERE, tls=tls, **options), Inbox()
            ends.append((channel, await channel.start(inbox), inbox))
        yield ends
    finally:
        for channel, _, _ in ends:
            await channel.aclose()


async def logged(caplog, text):
    """Wait until that was logged."""
    async with asyncio.timeout(20):
        while text not in caplog.text:  # noqa: ASYNC110 (a log has no event)
            await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def log(caplog):
    caplog.set_level(logging.INFO, "aiokv")


@pytest.mark.asyncio
async def test_an_address_names_the_certificate_that_is_there():
    a = tls_of("a")
    async with channels(a, tls_of("b")) as ((_, address, _), (_, other, _)):
        der = ssl.PEM_cert_to_DER_cert((CERTIFICATES / "a.pem").read_text())
        assert address.endswith("#" + hashlib.sha256(der).hexdigest())
        assert address.partition("#")[2] == a.fingerprint() != other.partition("#")[2]


@pytest.mark.asyncio
async def test_frames_of_all_sizes_both_ways_at_once():
    async with channels(tls_of("a"), tls_of("b")) as ((a, at_a, got_a), (b, at_b, got_b)):
        frames = [b"", b"x", bytes(16383), bytes(16384), bytes(16385), bytes(MAX_FRAME), b"last"]
        to_a, to_b = b.open(at_a), a.open(at_b)
        for frame in frames:
            to_a.send(frame)
            to_b.send(frame)
        assert await got_a.until(len(frames)) == frames
        assert await got_b.until(len(frames)) == frames


# -- who is kept out ------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_certificate_of_another_authority_is_refused_and_nothing_is_lost_of_the_others(caplog):
    stranger = tls_of("stranger")  # it trusts ours; we don't trust it
    async with channels(tls_of("a"), tls_of("b"), stranger) as ((_, at_a, got), (b, _, _), (intruder, _, _)):
        port = intruder.open(at_a)
        port.send(b"let me in")
        await logged(caplog, "TLS: CERTIFICATE_VERIFY_FAILED")  # at us
        await logged(caplog, "TLSV1_ALERT_UNKNOWN_CA")  # at the intruder
        b.open(at_a).send(b"x")
        assert await got.until(1) == [b"x"]
        assert len(port._queue) == 1  # and not sent to who won't take it


@pytest.mark.asyncio
async def test_no_certificate(caplog):
    async with channels(tls_of("a")) as ((_, address, got),):
        bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        bare.load_verify_locations(CERTIFICATES / "ca.pem")
        host, port = address.removeprefix("tls://").partition("#")[0].split(":")
        reader, writer = await asyncio.open_connection(host, int(port), ssl=bare)
        writer.write(GREETING + pack(b"let me in"))
        with contextlib.suppress(OSError):
            assert await reader.read() == b""
        await logged(caplog, "PEER_DID_NOT_RETURN_A_CERTIFICATE")
        assert got.frames == []
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


@pytest.mark.asyncio
async def test_a_certificate_that_is_not_listed(caplog):
    a, b = tls_of("a"), tls_of("b")
    async with channels(a, b, allow=[a.fingerprint()]) as ((mine, at_a, got), (other, at_b, _)):
        other.open(at_a).send(b"let me in")
        await logged(caplog, f"certificate {b.fingerprint()} is not allowed")
        mine.open(at_a).send(b"x")
        assert await got.until(1) == [b"x"]
        assert at_b


@pytest.mark.asyncio
async def test_plain_text_to_a_tls_port_and_the_other_way_round(caplog):
    plain, inbox = StreamChannel("stream://127.0.0.1:0"), Inbox()
    at_plain = await plain.start(inbox)
    async with contextlib.aclosing(plain), channels(tls_of("a")) as ((a, at_a, got),):
        plain.open(at_a.replace("tls", "stream").partition("#")[0]).send(b"x")
        # Both sides say why: who is connected to, and who connects.
        await logged(caplog, "(what is there speaks aiokv's protocol without TLS (stream://))")
        await logged(caplog, "closed by the other side before it greeted: is it bound to stream://, too?")
        a.open(at_plain.replace("stream", "tls") + "#" + "0" * 64).send(b"x")
        await logged(caplog, "what is there speaks TLS (tls://)")
        await logged(caplog, "closed by the other side before it greeted: is it bound to tls://, too?")
        assert got.frames == inbox.frames == []


@pytest.mark.asyncio
async def test_who_comes_back_and_is_refused_again_does_not_fill_the_log(caplog, monkeypatch):
    monkeypatch.setattr(streamport, "_AGAIN_MOST", 0.001)
    caplog.set_level(logging.DEBUG, "aiokv")
    async with channels(tls_of("a"), tls_of("stranger")) as ((_, at_a, _), (intruder, _, _)):
        intruder.open(at_a).send(b"let me in")
        async with asyncio.timeout(20):
            while sum("CERTIFICATE_VERIFY" in each.message for each in caplog.records) < 10:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
    loud = [each.message for each in caplog.records if each.levelno >= logging.INFO]
    assert len(loud) == len({text.partition(" cut: ")[2] for text in loud}), loud
    assert any("CERTIFICATE_VERIFY_FAILED" in text for text in loud)


@pytest.mark.asyncio
async def test_a_server_that_is_not_who_the_address_names_gets_nothing(caplog):
    """It has a good certificate, and the port of somebody who isn't there any more."""
    async with channels(tls_of("a"), tls_of("b")) as ((a, at_a, _), (_, at_b, got)):
        port = a.open(at_b.partition("#")[0] + "#" + at_a.partition("#")[2])
        port.send(b"secret")
        await logged(caplog, "who answers there isn't whom the address names")
        assert got.frames == []
        assert len(port._queue) == 1


@pytest.mark.asyncio
async def test_a_server_that_nobody_vouches_for(caplog):
    itself = tls_of("stranger", ca="stranger.pem")
    async with channels(tls_of("a"), itself) as ((a, _, _), (_, at_stranger, got)):
        a.open(at_stranger).send(b"secret")
        await logged(caplog, "TLS: CERTIFICATE_VERIFY_FAILED")
        assert got.frames == []


@pytest.mark.asyncio
async def test_an_address_without_a_certificate_is_refused():
    async with channels(tls_of("a")) as ((a, _, _),):
        with pytest.raises(ValueError, match="names no certificate"):
            a.open("tls://127.0.0.1:1")


@pytest.mark.asyncio
async def test_an_address_that_names_a_certificate_which_is_not_listed_is_refused():
    a, b = tls_of("a"), tls_of("b")
    async with channels(b) as ((_, at_b, _),), channels(a, allow=[a.fingerprint()]) as ((mine, at_a, _),):
        with pytest.raises(ValueError, match="names a certificate that is not allowed"):
            mine.open(at_b)
        mine.open(at_a)


@pytest.mark.asyncio
async def test_a_handshake_that_never_ends_is_cut(monkeypatch):
    monkeypatch.setattr(accepted, "CONTACT", 0.01)
    async with channels(tls_of("a")) as ((_, address, _),):
        end = tls_of("b").client_end("127.0.0.1")
        host, port = address.removeprefix("tls://").partition("#")[0].split(":")
        for said in (b"", end.outgoing()[:50]):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(said)
            with contextlib.suppress(OSError):
                assert await reader.read() == b""
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


# -- contexts of the user's -----------------------------------------------------------------------


@pytest.mark.asyncio
async def test_older_versions_and_contexts_of_the_users(monkeypatch):
    """TLS 1.2, with session tickets, and no certificate asked for: then addresses name none."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server.load_cert_chain(CERTIFICATES / "a.pem", CERTIFICATES / "a.key")
    client.load_verify_locations(CERTIFICATES / "ca.pem")
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    tls = Tls(server, client)
    assert not tls.mutual
    async with channels(tls, tls) as ((a, _, _), (_, address, got)):
        assert "#" not in address
        port = a.open(address.replace("127.0.0.1", "localhost"))
        for i in range(100):
            port.send(b"%d" % i)
        assert await got.until(100) == [b"%d" % i for i in range(100)]


@pytest.mark.asyncio
async def test_a_certificate_that_is_shown_and_need_not_be_names_nobody():
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(CERTIFICATES / "a.pem", CERTIFICATES / "a.key")
    server.load_verify_locations(CERTIFICATES / "ca.pem")
    server.verify_mode = ssl.CERT_OPTIONAL
    a = Tls(server, tls_of("a").client)
    async with channels(a) as ((channel, address, _),):
        assert "#" not in address
        senders = []
        inbox = Inbox()
        other = StreamChannel(HERE, tls=a)
        there = await other.start(lambda frame: (senders.append(other.sender), inbox(frame)))
        channel.open(there).send(b"x")
        await inbox.until(1)
        assert senders == [""]
        await other.aclose()


def test_host_names_are_checked_unless_told_otherwise():
    assert tls_of("a").client.check_hostname
    assert not tls_of("a", check_hostname=False).client.check_hostname


def test_a_context_without_a_certificate():
    empty = Tls(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    with pytest.raises(ssl.SSLError):
        empty.fingerprint()


@pytest.fixture
def files(tmp_path):
    """A certificate, its key and the authority's certificate, to be spoiled."""
    found = {"certificate": tmp_path / "a.pem", "key": tmp_path / "a.key", "ca": tmp_path / "ca.pem"}
    for file in found.values():
        shutil.copy(CERTIFICATES / file.name, file)
        file.chmod(0o600)
    return found


@pytest.mark.parametrize("role", ["certificate", "key", "ca"])
def test_what_is_wrong_with_a_file_is_said_with_its_role_and_name(files, role):
    Tls.load(**files)
    what = "private key" if role == "key" else "certificate"
    for text in (b"", b"\0\xff", (CERTIFICATES / ("a.pem" if role == "key" else "a.key")).read_bytes()):
        files[role].write_bytes(text)
        with pytest.raises(ValueError, match=f"^{role}: {files[role]} holds no {what} in PEM form"):
            Tls.load(**files)
    kind = "PRIVATE KEY" if role == "key" else "CERTIFICATE"
    files[role].write_text(f"-----BEGIN {kind}-----\nMIIB\n-----END {kind}-----\n")
    with pytest.raises(ValueError, match=f"^{role}: {files[role]} .*can't be used: "):
        Tls.load(**files)
    files[role].unlink()
    with pytest.raises(FileNotFoundError, match=f"{role}: No such file or directory: '{files[role]}'"):
        Tls.load(**files)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660])
def test_a_key_that_others_can_read_is_refused(files, mode):
    files["key"].chmod(mode)
    with pytest.raises(PermissionError, match=f"key: .*is open to others .*chmod 600 {files['key']}"):
        Tls.load(**files)


def test_a_key_of_another_certificate(files):
    shutil.copyfile(CERTIFICATES / "b.key", files["key"])  # its mode stays, which a checkout's isn't
    with pytest.raises(ValueError, match=r"key: .*a\.key belongs to another certificate than .*a\.pem"):
        Tls.load(**files)


def test_nobody_is_asked_for_a_pass_phrase(files):
    files["key"].write_text(ENCRYPTED)
    with pytest.raises(ValueError, match=r"key: .*a\.key is encrypted; a key without pass phrase is needed"):
        Tls.load(**files)


def test_bytes_in_any_pieces():
    tls = tls_of("a")
    asking, asked = tls.client_end("127.0.0.1"), tls.server_end()
    said = {asking: b"", asked: b""}
    for _ in range(3):
        for one, other in ((asking, asked), (asked, asking)):
            for byte in one.outgoing():
                said[other] += other.receive(bytes([byte]))
    assert asking.ready and asked.ready
    assert asking.peer == asked.peer == tls.fingerprint()
    for byte in asking.seal(b"one") + asking.seal(b"") + asking.seal(b"two" * 10_000):
        said[asked] += asked.receive(bytes([byte]))
    assert said[asked] == b"one" + b"two" * 10_000
