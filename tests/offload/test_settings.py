"""Sizes as text, and bounds that make sense."""

from __future__ import annotations

import pytest

from aiokv.offload.settings import TierSettings, size_of


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("64GiB", 64 << 30), ("1.5 MiB", 3 << 19), ("2kB", 2000), ("3TB", 3 * 10**12), ("12", 12), (7, 7)],
)
def test_sizes(text: str | int, nbytes: int) -> None:
    assert size_of(text, "capacity") == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 GiB MiB", "0", "1e9", "9999999TiB", 0])
def test_what_is_no_size(text: str | int) -> None:
    with pytest.raises(ValueError, match="capacity"):
        size_of(text, "capacity")


def test_settings_that_can_not_be_meant() -> None:
    for wrong in ({"part_bytes": 0}, {"retries": -1}, {"drain_s": 0}, {"events": 0}):
        with pytest.raises(ValueError):
            TierSettings(**wrong)
    for wrong in ({"part_bytes": 1.5}, {"drain_s": "2"}, {"drain_s": True}):
        with pytest.raises(TypeError):
            TierSettings(**wrong)
    assert TierSettings(retries=0).retries == 0
