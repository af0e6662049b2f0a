"""TCP addresses: what is one, and what a peer can be told."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiokv.control.address import Address, bindable, canonical
from aiokv.proto.session import key_of


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("tcp://127.0.0.1:5555", "127.0.0.1", 5555),
        ("tcp://127.0.0.1:0", "127.0.0.1", 0),
        ("tcp://prefill-0.svc_a.local:1", "prefill-0.svc_a.local", 1),
        ("tcp://prefill", "prefill", None),
        ("tcp://[::1]:65535", "::1", 65535),
        ("tcp://[fe80::1%eth0.1]:7", "fe80::1%eth0.1", 7),
    ],
)
def test_parsed_and_printed(text, host, port):
    address = Address.parse(text)
    assert (address.host, address.port) == (host, port)
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tcp",
        "tcp://",
        "tcp://:5555",
        "tcp://host:",
        "tcp://host:-1",
        "tcp://host:65536",
        "tcp://host:99999",
        "tcp://host:port",
        "tcp://host:1:2",
        "tcp://host:1/",
        "tcp://ho st:1",
        "tcp://host:1\n",
        "tcp://host:٣",
        "tcp://-host:1",
        "tcp://a..b:1",
        "tcp://" + "a" * 64 + ":1",
        "tcp://1.2.3:1",
        "tcp://256.0.0.1:1",
        "tcp://::1:5555",
        "tcp://[::1:5555",
        "tcp://[::g]:5555",
        "tcp://[1.2.3.4]x:1",
        "tcp://[:::]:1",
        "udp://host:1",
        "ipc:///tmp/x",
        "TCP://host:1",
    ],
)
def test_malformed(text):
    with pytest.raises(ValueError, match=r"tcp://|IP|port"):
        Address.parse(text)


@given(st.text(max_size=20))
def test_anything_is_parsed_or_refused(text):
    for candidate in (text, f"tcp://{text}:1", f"tcp://[{text}]:1"):
        try:
            address = Address.parse(candidate)
        except ValueError:
            continue
        assert Address.parse(str(address)) == address


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "[::]", "[::0]"])
def test_any_host(host):
    assert Address.parse(f"tcp://{host}:1").any_host


def test_a_name_takes_a_lookup_and_ipv4_is_preferred():
    address = Address.parse("tcp://localhost:1")
    assert address.ip is None
    six = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 1, 0, 0))
    four = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 1))
    assert str(address.looked_up([six, four])) == "tcp://127.0.0.1:1"
    assert str(address.looked_up([six])) == "tcp://[::1]:1"
    assert address.looked_up([six]).ipv6


KEY = "0123456789abcdef" * 4


def test_a_key_says_who_has_to_be_there():
    address = Address.parse(f"tcp://decode-1:5555#{KEY}")
    assert (address.key, address.endpoint, str(address)) == (
        KEY,
        "tcp://decode-1:5555",
        f"tcp://decode-1:5555#{KEY}",
    )
    assert key_of(str(address)) == KEY
    assert key_of("tcp://decode-1:5555") == key_of("memory://a") == ""
    assert address.with_key("").with_key(KEY) == address


@pytest.mark.parametrize("key", ["", KEY[:-1], KEY + "0", KEY + ":", KEY[:-1] + "g", KEY + "#" + KEY])
def test_what_is_no_key(key):
    with pytest.raises(ValueError, match="tcp://"):
        Address.parse(f"tcp://decode-1:5555#{key}")


@pytest.mark.parametrize("key", [KEY.upper(), ":".join(KEY[i : i + 2] for i in range(0, 64, 2)).upper()])
def test_a_fingerprint_as_openssl_writes_it(key):
    assert (
        str(Address.parse(f"tls://a:1#{key}", "tls")) == canonical(f"tls://a:1#{key}") == f"tls://a:1#{KEY}"
    )
    assert canonical("tcp://a:1") == "tcp://a:1"


def test_each_scheme_is_another_channels():
    assert str(Address.parse("stream://[::1]:7", "stream")) == "stream://[::1]:7"
    for text, scheme in [("tcp://a:1", "stream"), ("stream://a:1", "tcp"), ("a:1", "stream")]:
        with pytest.raises(ValueError, match=f"{scheme}://host:port"):
            Address.parse(text, scheme)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True), ("127.9.9.9", True), ("[::1]", True), ("localhost", True),
        ("0.0.0.0", False), ("*", False), ("[::]", False), ("192.0.2.1", False), ("prefill-0", False),
    ],
)  # fmt: skip
def test_what_other_hosts_can_reach(host, loopback):
    assert Address.parse(f"tcp://{host}:1").loopback is loopback


def test_who_binds_names_no_key():
    with pytest.raises(ValueError, match="keys="):
        bindable(f"tcp://127.0.0.1:0#{KEY}", None, "tcp")
    with pytest.raises(ValueError, match="keys="):
        bindable("tcp://127.0.0.1:0", f"tcp://prefill-0#{KEY}", "tcp")
