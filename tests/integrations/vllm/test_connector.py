"""The connector's class beside the one of the vLLM that is here."""

from __future__ import annotations

import inspect

import pytest

import aiokv.integrations.vllm

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]  # what vLLM imports warns


def test_it_takes_what_vllm_gives() -> None:
    """Each method that vLLM has, too, has vLLM's parameters."""
    connector = aiokv.integrations.vllm.AioKVConnector
    looked_at = 0
    for base in connector.__mro__[1:-1]:
        for name in vars(connector).keys() & vars(base).keys():
            theirs, mine = getattr(base, name), getattr(connector, name)
            if inspect.isroutine(theirs):
                wanted, found = inspect.signature(theirs).parameters, inspect.signature(mine).parameters
                assert list(found) == list(wanted), name
                looked_at += 1
    assert looked_at > 20
