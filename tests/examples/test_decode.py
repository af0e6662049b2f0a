"""decode.py as it is started by hand: its prompts, and what it says when one of them fails."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

import aiokv

pytest.importorskip("transformers", reason="the examples need the extra: pip install 'aiokv[examples]'")

import decode
from prefill import Prefill

from serving.channel import serve
from serving.model import Model
from serving.typed import lines

Caches = tuple[aiokv.KVCache, aiokv.KVCache]

SMALL = ["--blocks=8", "--limit=5"]


@pytest.fixture
def caches(model: Model) -> Iterator[Caches]:
    layout = model.layout(8, 16)
    with closing(aiokv.KVCache.allocate(layout)) as one, closing(aiokv.KVCache.allocate(layout)) as other:
        yield one, other


@asynccontextmanager
async def prefill_at(model: Model, cache: aiokv.KVCache) -> AsyncIterator[str]:
    options = decode.parsed([*SMALL, "--prefill=127.0.0.1:1"])
    async with (
        aiokv.TransferEngine(cache) as engine,
        serve("127.0.0.1:0", Prefill(model, engine, options).answer) as address,
    ):
        yield address
    await asyncio.get_running_loop().shutdown_default_executor()


@pytest.mark.asyncio
async def test_a_prompt_that_fails_is_told_and_the_next_is_answered(
    model: Model, caches: Caches, capsys: pytest.CaptureFixture[str]
) -> None:
    async with prefill_at(model, caches[0]) as address:
        asked = ["How are you?", "", "long " * 50, " ", "And?"]
        options = decode.parsed([*SMALL, f"--prefill={address}", *(f"--prompt={each}" for each in asked)])
        assert await decode.main(model, aiokv.TransferEngine(caches[1]), options) == 1
    out, err = capsys.readouterr()
    assert [len(line) for line in out.splitlines()] == [5, 5]
    assert err == "failed: 16 blocks needed, and there are 8: raise --blocks\n"


@pytest.mark.asyncio
async def test_a_prefill_that_is_not_there_fails_each_prompt(
    model: Model, caches: Caches, capsys: pytest.CaptureFixture[str]
) -> None:
    async def nobody(*_: object) -> None:
        """Takes requests until it is stopped."""

    async with serve("127.0.0.1:0", nobody) as gone:
        pass
    options = decode.parsed([*SMALL, f"--prefill={gone}", "--prompt=one", "--prompt=two"])
    assert await decode.main(model, aiokv.TransferEngine(caches[1]), options) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert [line[:8] for line in err.splitlines()] == ["failed: "] * 2
    assert err.count(f"{gone}: ") == 2


@pytest.mark.asyncio
async def test_who_is_not_answered_says_where_it_is_to_be_reached(
    model: Model, caches: Caches, capsys: pytest.CaptureFixture[str]
) -> None:
    async with prefill_at(model, caches[0]) as address:
        nowhere = "tcp://127.0.0.1:1"
        options = decode.parsed([*SMALL, f"--prefill={address}", "--deadline=1", "--prompt=Anybody?"])
        engine = aiokv.TransferEngine(caches[1], advertise=nowhere)
        assert await decode.main(model, engine, options) == 1
    assert f"told to reach this process at {nowhere}" in capsys.readouterr().err


# -- standard input


@pytest.mark.asyncio
async def test_lines_come_as_they_are_typed() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading) as file, os.fdopen(writing, "wb", buffering=0) as keyboard:
        typed = lines(file)
        keyboard.write(b" one \n\ntw")
        assert [await anext(typed), await anext(typed)] == ["one", ""]
        waiting = asyncio.ensure_future(anext(typed))
        await asyncio.sleep(0)
        keyboard.write(b"o\nlast")
        assert await waiting == "two"
        keyboard.close()
        assert [line async for line in typed] == ["last"]


@pytest.mark.asyncio
async def test_lines_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("one\ntwo\n")
    with (tmp_path / "prompts").open() as file:
        assert [line async for line in lines(file)] == ["one", "two"]


@pytest.mark.asyncio
async def test_waiting_for_a_line_can_be_cancelled() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading) as file, os.fdopen(writing, "wb"):
        waiting = asyncio.ensure_future(anext(lines(file)))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not asyncio.get_running_loop().remove_reader(reading)
