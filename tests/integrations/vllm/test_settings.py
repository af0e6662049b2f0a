from __future__ import annotations

import pytest

from aiokv.integrations.vllm.settings import ConnectorSettings


def test_fields_of_both_kinds() -> None:
    found = ConnectorSettings.read({"hold": 5, "decode_ranks": 2, "transports": ["tcp"], "liveness": "5s"})
    assert (found.hold, found.decode_ranks, found.load_timeout) == (5, 2, 60.0)
    assert found.hold_at_most == 600
    assert ConnectorSettings.read({"hold": 1000}).hold_at_most == 1000
    assert found.engine.transports == ("tcp",)
    assert found.engine.liveness == 5


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"transport": ["tcp"]}, "no field 'transport'; 'transports' is meant"),
        ({"xyzzy": 1}, "no field 'xyzzy'; there are hold"),
        ({"hold": 0}, "hold"),
        ({"hold_at_most": 20}, "hold_at_most=20 is less than hold=30"),
        ({"hold_at_most": "long"}, "hold_at_most"),
        ({"load_timeout": "soon"}, "load_timeout"),
        ({"decode_ranks": 0}, "decode_ranks"),
        ({"model": 7}, "model"),
        ({"layerwise": "yes"}, "layerwise"),
        ({"chunks": 1}, "chunks"),
        ({"host_tier": "64GB!"}, "host_tier: .*64GiB"),
        ({"host_tier": 0}, "host_tier"),
        ({"host_tier_policy": "fifo"}, "host_tier_policy: .*lru"),
        ({"host_pool": 1}, "host_pool: .*a path"),
        ({"host_pool": "/" + "x" * 200}, "host_pool: .*107"),
        ({"host_pool": "/run/pool", "host_tier": "1GiB"}, "host_pool: host_tier .*drop one.*--capacity"),
        ({"host_pool": "/run/pool", "host_tier_policy": "arc"}, "host_pool: host_tier_policy .*--policy"),
        ({"router": {"address": "tcp://127.0.0.1:7000"}}, "router: .*role"),
        ({"router": "tcp://127.0.0.1:7000"}, "router"),
        ({"transports": ["pigeon"]}, "pigeon"),
    ],
)
def test_what_cant_be_meant_is_named(extra: dict[str, object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        ConnectorSettings.read(extra)


def test_a_host_tier_by_its_size() -> None:
    assert ConnectorSettings.read({"host_tier": "64GiB"}).host_tier == 64 << 30
    assert ConnectorSettings.read({}).host_tier is None
    assert not ConnectorSettings.read({}).keeps


def test_a_pool_by_its_path() -> None:
    found = ConnectorSettings.read({"host_pool": "/run/pool", "host_tier": None})
    assert (found.host_pool, found.keeps) == ("/run/pool", True)


def test_ranks_take_ports_in_a_row() -> None:
    fixed = ConnectorSettings.read({"bind": "tcp://127.0.0.1:7000"})
    assert [fixed.at_rank(rank).bind for rank in (0, 2)] == ["tcp://127.0.0.1:7000", "tcp://127.0.0.1:7002"]
    assert ConnectorSettings.read({}).at_rank(2).bind == "tcp://127.0.0.1:0"
    behind_nat = ConnectorSettings.read({"bind": "tcp://10.0.0.1:7000", "advertise": "tcp://192.0.2.1:8000"})
    assert behind_nat.at_rank(1).advertise == "tcp://192.0.2.1:8001"
    assert fixed.registered("tcp://127.0.0.1:7000#KEY", 2) == [
        "tcp://127.0.0.1:7000#KEY",
        "tcp://127.0.0.1:7001#KEY",
    ]
