"""TCP addresses: what is one, and what a peer can be told."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiokv.control.address import TcpAddress


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
    address = TcpAddress.parse(text)
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
        TcpAddress.parse(text)


@given(st.text(max_size=20))
def test_anything_is_parsed_or_refused(text):
    for candidate in (text, f"tcp://{text}:1", f"tcp://[{text}]:1"):
        try:
            address = TcpAddress.parse(candidate)
        except ValueError:
            continue
        assert TcpAddress.parse(str(address)) == address


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "[::]", "[::0]"])
def test_any_host(host):
    assert TcpAddress.parse(f"tcp://{host}:1").any_host


def test_a_name_takes_a_lookup_and_ipv4_is_preferred():
    address = TcpAddress.parse("tcp://localhost:1")
    assert address.ip is None
    six = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 1, 0, 0))
    four = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 1))
    assert str(address.looked_up([six, four])) == "tcp://127.0.0.1:1"
    assert str(address.looked_up([six])) == "tcp://[::1]:1"
    assert address.looked_up([six]).ipv6
