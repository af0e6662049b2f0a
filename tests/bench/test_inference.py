"""What a vLLM tells when it is measured, and that one that fails isn't waited for; vLLM is played."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from aiokv.bench.child import ChildFailed, child
from aiokv.bench.inference import FUNCTION
from aiokv.bench.suite import vllm

# With a connector a request waits for three steps; then each step computes a token of it.
PLAYED = """
import threading
from types import SimpleNamespace

SamplingParams = SimpleNamespace

class Connector:
    def __getattr__(self, name):
        return lambda *_: None

CONNECTOR = Connector()

class LLM:
    def __init__(self, model, **options):
        if model == "broken":
            threading.Thread(target=threading.Event().wait).start()
            raise RuntimeError("it can't be had")
        self.requests, self.waits = {}, 3 if options.get("kv_transfer_config") else 0
        self.scheduler = SimpleNamespace(
            has_requests=lambda: bool(self.requests), schedule=self.schedule, connector=CONNECTOR
        )
        core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=self.scheduler))
        self.llm_engine = SimpleNamespace(
            step=self.step, add_request=self.add, engine_core=core, has_unfinished_requests=lambda: False
        )

    def add(self, name, prompt, sampling):
        if prompt["prompt_token_ids"] == ["refused"]:
            raise ValueError("no such token")
        self.requests[name] = SimpleNamespace(left=self.waits, sampling=sampling, tokens=[])

    def schedule(self):
        tokens = 0
        for each in self.requests.values():
            each.left -= 1
            tokens += each.left < 0
        return SimpleNamespace(total_num_scheduled_tokens=tokens)

    def step(self):
        output = self.scheduler.schedule()
        CONNECTOR.build_connector_meta(output)
        if output.total_num_scheduled_tokens:
            CONNECTOR.wait_for_layer_load("layer")
        found = []
        for name, each in list(self.requests.items()):
            if each.left >= 0:
                continue
            each.tokens.append(7)
            over = len(each.tokens) == each.sampling.max_tokens
            inner = SimpleNamespace(token_ids=each.tokens, finish_reason="length" if over else None)
            found.append(
                SimpleNamespace(request_id=name, finished=over, outputs=[inner], kv_transfer_params=None)
            )
            if over:
                del self.requests[name]
        return found
"""


@pytest.fixture(autouse=True)
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Children import this vLLM."""
    inner = tmp_path / "vllm" / "distributed"
    inner.mkdir(parents=True)
    (inner.parent / "__init__.py").write_text(PLAYED)
    (inner.parent / "config.py").write_text("from types import SimpleNamespace as KVTransferConfig\n")
    (inner / "__init__.py").touch()
    (inner / "kv_transfer.py").write_text(
        "from vllm import CONNECTOR\nget_kv_transfer_group = lambda: CONNECTOR\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.one_loop,
    pytest.mark.may_block(reason="starting a process blocks"),
]


async def test_steps_that_only_wait_are_counted_apart() -> None:
    async with child(FUNCTION, model="", transfer={"kv_connector": "played"}) as started:
        await started.heard()
        for _ in range(2):
            said = await started.ask("", name="1", prompt=[3], tokens=4, params=None)
            assert (said["tokens"], said["reason"]) == ([7] * 4, "length")
            assert (said["computing"][0], said["waiting"][0]) == (4, 3)


async def test_one_that_can_t_be_had_is_not_waited_for() -> None:
    """A thread of it lives on, and so does its process."""
    async with child(FUNCTION, model="broken", transfer=None) as started:
        with pytest.raises(ChildFailed):
            await started.heard()


async def test_one_that_fails_while_it_listens_is_not_waited_for() -> None:
    async with child(FUNCTION, model="", transfer=None) as started:
        await started.heard()
        with pytest.raises(ChildFailed):
            await started.ask("", name="1", prompt=["refused"], tokens=4, params=None)


async def test_rounds_of_a_pair() -> None:
    """Both are stopped in between; of one that has died, or answers too little, no figure comes."""
    async with (
        child(FUNCTION, model="", transfer={}) as prefill,
        child(FUNCTION, model="", transfer={"kv_connector": "played"}) as decode,
    ):
        await prefill.heard()
        await decode.heard()
        asking = vllm.Asking(prefill, decode)
        await asking.round(2)
        assert asking.answers == [[7] * 16] * 2
        for each in (prefill, decode):
            assert os.waitid(os.P_PID, each.pid, os.WSTOPPED | os.WNOWAIT)  # noqa: ASYNC222
        prefill.signal(signal.SIGKILL)
        with pytest.raises(ChildFailed):
            await asking.round(1)
