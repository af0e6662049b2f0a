"""What Prometheus gets of an engine."""

from __future__ import annotations

import re
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families

import aiokv
from aiokv.metrics import Exporter
from aiokv.testing.pairs import LAYOUT, Engines, connected_pair, transfer


@pytest.mark.asyncio
async def test_a_transfer_shows_in_what_is_scraped() -> None:
    registry = CollectorRegistry()
    async with connected_pair() as (producer, consumer):
        exporter = Exporter(producer, registry, {"rank": "0"})
        exporter.add(consumer, {"rank": "1"})
        await transfer(producer, consumer, "t")
        found = consumer.statistics()

        def of(name: str, **labels: str) -> float | None:
            return registry.get_sample_value(f"aiokv_{name}", labels)

        nbytes = of("bytes_total", rank="1", direction="received", transport="memory")
        assert nbytes == found.bytes_received > 0
        assert of("parts_ended_total", rank="1", outcome="landed") == found.parts_ended["landed"] == 2
        assert of("control_frames_total", rank="1", direction="sent") == found.frames_sent > 0
        assert of("leased_blocks", rank="1") == 0
        assert of("window_bytes", rank="1") == aiokv.Settings().window_bytes
        exporter.close()
        assert generate_latest(registry) == b""


@pytest.mark.asyncio
async def test_times_in_each_state_are_histograms() -> None:
    registry = CollectorRegistry()
    async with connected_pair() as (producer, consumer):
        with Exporter(consumer, registry):
            await transfer(producer, consumer, "t")
            times = consumer.statistics().state_times
            for state in ("offered", "granted", "moving", "draining"):
                labels = {"role": "consumer", "state": state}
                count = registry.get_sample_value("aiokv_part_state_seconds_count", labels)
                assert count == times["consumer", state].count == 2  # the pair's first contact is one
                total = registry.get_sample_value("aiokv_part_state_seconds_sum", labels)
                assert total == times["consumer", state].total
                most = registry.get_sample_value("aiokv_part_state_seconds_bucket", {**labels, "le": "+Inf"})
                assert most == 2


@pytest.mark.asyncio
async def test_both_forms_of_exposition_are_well_formed() -> None:
    registry = CollectorRegistry()
    async with connected_pair() as (producer, consumer):
        with Exporter(consumer, registry, {"rank": "0"}) as exporter:
            exporter.add(producer, {"rank": "1"})
            text = generate_latest(registry).decode()
            declared = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
            assert len(declared) == len(set(declared))
            families = list(text_string_to_metric_families(generate_openmetrics(registry).decode()))
            assert {sample.labels["rank"] for family in families for sample in family.samples} == {"0", "1"}
            for family in families:
                assert family.documentation
                assert family.name.startswith("aiokv_")


@pytest.mark.asyncio
async def test_what_would_be_shown_twice_is_refused() -> None:
    registry = CollectorRegistry()
    async with connected_pair() as (producer, consumer):
        with Exporter(producer, registry, {"rank": "0"}) as exporter:
            with pytest.raises(ValueError, match=r"already: .*exporter\.add\(engine, labels\)"):
                Exporter(consumer, registry)
            with pytest.raises(ValueError, match="is shown already"):
                exporter.add(producer, {"rank": "1"})
            with pytest.raises(ValueError, match="tell them apart"):
                exporter.add(consumer, {"rank": "0"})
            with pytest.raises(ValueError, match=r"have the labels \['rank'\]"):
                exporter.add(consumer, {"worker": "1"})
            with pytest.raises(ValueError, match=r"\['role'\] are the metrics' own"):
                Exporter(consumer, CollectorRegistry(), {"role": "decode"})
        exporter.close()  # a second time
        assert generate_latest(registry) == b""
        with pytest.raises(aiokv.ClosedError, match="the exporter is closed"):
            exporter.add(consumer, {"rank": "1"})
        Exporter(consumer, registry).close()


@pytest.mark.parametrize(
    ("labels", "kind"),
    [
        ({"rank": 0}, TypeError),
        ({"rank": None}, TypeError),
        ({0: "rank"}, TypeError),
        ("rank", TypeError),
        (["rank"], TypeError),
        ({"": "0"}, ValueError),
        ({"__x": "0"}, ValueError),
        ({"a-b": "0"}, ValueError),
        ({"a b": "0"}, ValueError),
        ({"0a": "0"}, ValueError),
        ({"ä": "0"}, ValueError),
        ({"le": "0"}, ValueError),
    ],
)
@pytest.mark.asyncio
async def test_labels_that_would_break_every_scrape_are_refused(labels: Any, kind: type[Exception]) -> None:
    registry = CollectorRegistry()
    async with connected_pair() as (producer, _):
        with pytest.raises(kind, match="^labels"):
            Exporter(producer, registry, labels)
        assert generate_latest(registry) == b""
        with Exporter(producer, registry, {"_rank0": '\n"ä'}):
            generate_latest(registry)


def test_what_is_no_engine_or_registry_is_refused() -> None:
    for given in ((5,), (None,), (None, 5)):
        with pytest.raises(TypeError, match="^engine is a|^registry is a"):
            Exporter(*given)


@pytest.mark.asyncio
async def test_an_engine_that_is_not_entered_shows_nothing_and_one_that_is_closed_its_last_counts() -> None:
    registry = CollectorRegistry()
    async with Engines() as engines:
        engine = engines.make("a", await engines.cache(LAYOUT))
        with Exporter(engine, registry):
            assert registry.get_sample_value("aiokv_turns_total") is None
            await engines.enter(engine)
            assert registry.get_sample_value("aiokv_turns_total") is not None
            await engines.close(engine)
            assert registry.get_sample_value("aiokv_sessions") == 0
