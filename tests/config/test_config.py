"""One configuration, from whatever source, with errors that say where."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

import aiokv
from aiokv import Config
from aiokv.control.keys import Keys
from aiokv.proto.settings import Settings
from aiokv.testing.pairs import LAYOUT, transfer
from aiokv.tracing import Recorder

WANTED: dict[str, Any] = {
    "bind": "tcp://127.0.0.1:0",
    "advertise": "tcp://localhost",
    "keys": "/etc/aiokv",
    "allow": ["ab" * 32, "cd" * 32],
    "insecure": True,
    "transports": ["shm", "tcp"],
    "data_ports": "7000-7002, 7010",
    "tcp_streams": 4,
    "contact": "1min",
    "heartbeat": 0.25,
    "liveness": "5s",
    "close": 0,
    "tombstones": 12,
    "chunk": "1MiB",
    "window": "64MB",
    "staging": "16MiB",
    "pinned": "1GiB",
    "nccl_staging": "256MiB",
}


def made() -> Config:
    return Config(**WANTED)


def toml_of(fields: dict[str, Any]) -> str:
    return "[aiokv]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in fields.items())


def env_of(fields: dict[str, Any]) -> dict[str, str]:
    return {
        f"AIOKV_{name.upper()}": ",".join(value) if isinstance(value, list) else str(value)
        for name, value in fields.items()
    }


def test_defaults_are_those_of_the_engine() -> None:
    assert Config().settings == Settings()
    assert Config().transports is None
    assert Config().data_ports == ()


def test_every_setting_has_its_field() -> None:
    names = {each.name.removesuffix("_ns").removesuffix("_bytes") for each in dataclasses.fields(Settings)}
    assert names <= set(Config.__struct_fields__)


def test_text_and_numbers_are_kept_in_one_form() -> None:
    config = made()
    assert config.transports == ("shm", "tcp")
    assert config.data_ports == (7000, 7001, 7002, 7010)
    assert config.settings == Settings(
        contact_ns=60 * 10**9,
        heartbeat_ns=250 * 10**6,
        liveness_ns=5 * 10**9,
        close_ns=0,
        tombstones=12,
        chunk_bytes=1 << 20,
        window_bytes=64 * 10**6,
        staging_bytes=16 << 20,
        pinned_bytes=1 << 30,
        nccl_staging_bytes=256 << 20,
    )
    assert config == Config(
        **{**WANTED, "contact": 60, "chunk": 1 << 20, "data_ports": [7000, 7001, 7002, 7010]}
    )
    assert hash(config) == hash(made())


def test_all_sources_have_the_same_names(tmp_path: Path) -> None:
    path = tmp_path / "engine.toml"
    path.write_text(toml_of(WANTED))
    assert Config.from_toml(path) == made()
    assert Config.from_env(env_of(WANTED)) == made()
    assert Config.from_mapping(json.loads(json.dumps(WANTED))) == made()
    assert msgspec.json.decode(json.dumps(WANTED), type=Config) == made()
    assert msgspec.json.decode(msgspec.json.encode(made()), type=Config) == made()


def test_sources_go_on_top_of_each_other(tmp_path: Path) -> None:
    path = tmp_path / "engine.toml"
    path.write_text(toml_of({"liveness": "5s", "peers": 7}))
    config = Config.from_env({"AIOKV_PEERS": "9", "HOME": "/"}, base=Config.from_toml(path))
    assert (config.liveness, config.peers) == (5.0, 9)


def test_lists_of_keys_come_as_text_too() -> None:
    one, two = "ab" * 32, "cd" * 32
    assert Config.from_env({"AIOKV_ALLOW": f"{one}, {two},"}).allow == (one, two)
    assert Config(allow=[":".join(["AB"] * 32)]).allow == Config(allow=":".join(["AB"] * 32)).allow == (one,)
    assert Config(allow="keys").allow == "keys"


def test_the_environment_is_read_only_when_asked_for_and_never_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AIOKV_PEERS", "9")
    before = dict(os.environ)
    assert Config().peers == Settings().peers
    assert Config.from_env().peers == 9
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("field", "value", "kind", "message"),
    [
        (
            "liveness",
            "5 minutes",
            ValueError,
            "liveness is a number with a unit of us, ms, s, min, h, such as",
        ),
        ("liveness", "-5s", ValueError, "liveness is a number with a unit"),
        ("liveness", float("inf"), ValueError, "liveness is a time that ends"),
        ("liveness", -1.0, ValueError, "liveness is a time of more than 0 s, not -1 s"),
        ("liveness", True, TypeError, "liveness is a time in seconds"),
        ("liveness", None, TypeError, "liveness is a time in seconds"),
        ("liveness", 1, ValueError, "liveness=1 s is less than three heartbeats of 0.5 s"),
        ("heartbeat", "1s", ValueError, "heartbeat * 2 <= lease < drain, not 1 s * 2 <= 1.5 s < 2 s"),
        ("close", -0.5, ValueError, "close is a time of at least 0 s, not -0.5 s"),
        (
            "bind",
            "tcp://*:0",
            ValueError,
            "can be reached from other hosts, where anybody could use this engine: pass keys and allow",
        ),
        ("bind", "tcp://*:0", ValueError, "pass advertise = one that is"),
        ("bind", "http://a:1", ValueError, "tcp://host:port, stream://host:port or tls://host:port"),
        ("window", "64M", ValueError, "window is a number with a unit of B, KiB, MiB, GiB, kB, MB, GB"),
        ("window", "0.3B", ValueError, "window is a whole number of bytes"),
        ("window", 1.5, TypeError, "window is an integer"),
        ("staging", "64M", ValueError, "staging is a number with a unit"),
        ("pinned", 0, ValueError, "pinned is an integer of at least 1"),
        ("nccl_staging", -1, ValueError, "nccl_staging is an integer of at least 1"),
        ("peers", "7", TypeError, "peers is an integer"),
        ("peers", 0, ValueError, "peers is an integer of at least 1"),
        ("tcp_streams", 99, ValueError, "tcp_streams is a number from 1 to 16"),
        ("data_ports", "7000-", ValueError, "data_ports is ports and ranges"),
        ("data_ports", "7009-7000", ValueError, "data_ports has the range '7009-7000', which runs backwards"),
        ("data_ports", "7000, 7009-7000", ValueError, "data_ports has the range '7009-7000'"),
        ("data_ports", "1-99999999999", ValueError, "data_ports lists ports from 1 to 65535"),
        ("data_ports", [0], ValueError, "data_ports lists ports from 1"),
        ("transports", "tcp", TypeError, "transports is a list of names"),
        ("transports", ["rdma"], ValueError, "there is no transport 'rdma'"),
        ("insecure", "yes", TypeError, "insecure is true or false"),
        ("keys", 5, TypeError, "keys is the path of a file"),
        ("keys", "", ValueError, "keys is the path of a file, not empty"),
        ("allow", "", ValueError, "allow is the path of a file, not empty"),
        ("allow", "ab" * 32 + ",me", ValueError, "allow lists keys of 64 hexadecimal digits, not 'me'"),
        ("allow", ["me"], ValueError, "allow lists keys of 64 hexadecimal digits"),
        ("allow", 5, TypeError, "allow is a list of keys, or the path"),
        ("tls_ca", "ca.pem", ValueError, "tls_certificate, tls_key, tls_ca go together"),
        ("bind", "here", ValueError, "'here' is not tcp://host:port"),
        ("bind", 7, TypeError, "bind is an address"),
        ("advertise", "tcp://0.0.0.0:1", ValueError, "advertise='tcp://0.0.0.0:1' is no address"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_name_and_source(
    field: str, value: Any, kind: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(kind) as direct:
        Config(**{field: value})
    assert message in str(direct.value)
    with pytest.raises(ValueError) as mapped:
        Config.from_mapping({"tombstones": 5, field: value}, source="kv_connector_extra_config")
    assert str(mapped.value).startswith(f"kv_connector_extra_config: {field}: ")
    assert message in str(mapped.value)


def test_errors_name_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for variables, message in (
        ({"AIOKV_PEERS": "many"}, "AIOKV_PEERS: peers is an integer, not 'many'"),
        ({"AIOKV_LIVENESS": "long"}, "AIOKV_LIVENESS: liveness is a number with a unit"),
        (
            {"AIOKV_TRANSPORT": "tcp"},
            "AIOKV_TRANSPORT: there is no such field; did you mean AIOKV_TRANSPORTS?",
        ),
        ({"AIOKV_INSECURE": "yes"}, "AIOKV_INSECURE: insecure is true or false, not 'yes'"),
        ({"AIOKV_QQQ": "tcp"}, "AIOKV_QQQ: there is no such field"),
        ({"AIOKV_BIND": "here", "AIOKV_PEERS": "7"}, "AIOKV_BIND: 'here' is not tcp"),
        ({"AIOKV_LEASE": "9s", "AIOKV_DRAIN": "8s"}, "AIOKV_LEASE, AIOKV_DRAIN: timers must keep"),
    ):
        with pytest.raises(ValueError) as raised:
            Config.from_env(variables)
        assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[aiokv]\npeers = 'x'\n", "peers: peers is an integer"),
        ("[aiokv]\npeer = 1\n", "peer: there is no such field; did you mean peers?"),
        ("[other]\n", "there is no table [aiokv]"),
        ("aiokv = 5\n", "there is no table [aiokv]"),
        ("[aiokv\n", "at line 1"),
    ],
)
def test_errors_name_the_file(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "my engine.toml"
    path.write_text(text)
    with pytest.raises(ValueError) as raised:
        Config.from_toml(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert message in str(raised.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Config.from_toml(tmp_path / "none.toml")


@pytest.mark.parametrize("mapping", [None, [], "bind", 5])
def test_what_is_no_mapping(mapping: Any) -> None:
    with pytest.raises(TypeError, match="^options is a mapping of fields to values, not "):
        Config.from_mapping(mapping, source="options")


def test_names_that_are_no_strings() -> None:
    with pytest.raises(ValueError, match="^config: 1: there is no such field"):
        Config.from_mapping({1: 2})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"keys": "{}/none"}, OSError, "{source}: keys: No such file or directory: '{}/none'"),
        ({"keys": "{}/aiokv.pub"}, ValueError, "{source}: keys: {}/aiokv.pub: this is a public key"),
        ({"keys": "{}", "allow": "{}"}, OSError, "{source}: allow: No such file or directory: '{}/allowed'"),
        ({"keys": "{}"}, ValueError, "{source}: keys: keys is this engine's own, allow lists those"),
        ({"bind": "tls://127.0.0.1:0"}, ValueError,
         "{source}: bind: bind 'tls://127.0.0.1:0': pass tls_certificate, tls_key and tls_ca"),
        ({"bind": "tcp://192.0.2.1:0"}, ValueError, "insecure = true on a network"),
        (
            {"bind": "tls://127.0.0.1:0", "tls_certificate": "{}/a", "tls_key": "{}/b", "tls_ca": "{}/c"},
            OSError,
            "{source}: tls_certificate: certificate: No such file or directory: '{}/a'",
        ),
        ({"transports": ["nccl", "cuda_ipc"]}, ValueError,
         "{source}: transports: transports ['nccl', 'cuda_ipc'] can't serve a cache in host memory"),
    ],
)  # fmt: skip
def test_what_the_engine_finds_is_told_with_the_field_and_where_it_stands(
    fields: dict[str, Any], kind: type[Exception], text: str, tmp_path: Path
) -> None:
    Keys.generate().save(tmp_path)
    (tmp_path / "e.toml").write_text(toml_of(fields).replace("{}", str(tmp_path)))
    config = Config.from_env({"AIOKV_PEERS": "3"}, base=Config.from_toml(tmp_path / "e.toml"))
    with aiokv.KVCache.allocate(LAYOUT) as cache, pytest.raises(kind) as raised:
        config.engine(cache)
    expected = text.replace("{source}", str(tmp_path / "e.toml")).replace("{}", str(tmp_path))
    assert expected in str(raised.value)


def test_where_fields_stand_is_neither_compared_nor_written() -> None:
    assert Config.from_mapping({"peers": 3}) == Config(peers=3)
    assert msgspec.json.encode(Config.from_mapping({"peers": 3})) == msgspec.json.encode(Config(peers=3))
    assert "places" not in repr(Config.from_mapping({"peers": 3}))


def test_what_msgspec_reads_has_no_other_fields() -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field `bindd`"):
        msgspec.json.decode(b'{"bindd": "x"}', type=Config)
    with pytest.raises(msgspec.ValidationError, match="peers is an integer of at least 1"):
        msgspec.json.decode(b'{"peers": 0}', type=Config)


@pytest.mark.asyncio
@pytest.mark.may_block(reason="allocates a cache")
async def test_an_engine_is_as_it_was_told() -> None:
    recorder = Recorder()
    config = Config(transports=["tcp"], advertise="tcp://localhost", peers=3, tcp_streams=1)
    with aiokv.KVCache.allocate(LAYOUT) as cache:
        async with config.engine(cache, trace=recorder) as engine:
            assert engine.address.startswith("tcp://localhost:")
            assert engine._core is not None
            assert engine._core.settings == config.settings
            assert list(engine._core.peers._me.hello.transports) == ["tcp"]


@pytest.mark.asyncio
@pytest.mark.may_block(reason="reads keys, allocates caches")
async def test_keys_are_read_when_the_engine_is_made(tmp_path: Path) -> None:
    mine, theirs = Keys.generate(), Keys.generate()
    (mine.save(tmp_path / "a") / "allowed").write_text(f"{theirs.public} decode\n")
    theirs.save(tmp_path / "b")
    with aiokv.KVCache.allocate(LAYOUT) as there, aiokv.KVCache.allocate(LAYOUT) as here:
        async with (
            Config(keys=str(tmp_path / "a"), allow=str(tmp_path / "a")).engine(there) as producer,
            Config.from_env({"AIOKV_KEYS": str(tmp_path / "b/aiokv.key"), "AIOKV_ALLOW": mine.public}).engine(
                here
            ) as consumer,
        ):
            assert producer.address.endswith(mine.public)
            await transfer(producer, consumer, "t")
        with pytest.raises(FileNotFoundError):
            Config(keys=str(tmp_path / "c"), allow=[mine.public]).engine(here)


@pytest.mark.asyncio
@pytest.mark.may_block(reason="allocates a cache")
async def test_nobody_is_let_in_from_other_hosts_unless_asked_for_by_name() -> None:
    bind = {"bind": "tcp://0.0.0.0:0", "advertise": "tcp://localhost"}
    with aiokv.KVCache.allocate(LAYOUT) as cache:
        with pytest.raises(ValueError, match="insecure"):
            Config(**bind).engine(cache)
        async with Config(**bind, insecure=True).engine(cache):
            pass
