"""All of it as users have it: vLLM's own servers, which make themselves known to aiokv's router."""

from __future__ import annotations

import json
import os
import random
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

OPTIONS = ["--enforce-eager", "--dtype=float32", "--max-model-len=1024", "--max-num-seqs=8"]


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        taken = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in taken]


@contextmanager
def program(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    settings = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    process = subprocess.Popen([sys.executable, "-m", *arguments], env={**os.environ, **settings})
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def asked(url: str, **body: Any) -> str:
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        found: str = answer.read().decode()
        return found


def once_up(call: Callable[[], list[int]], programs: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """What it gives once nobody is missing; until then the router isn't there, or says 503."""
    while True:
        try:
            return call()
        except urllib.error.URLError:
            assert [each.poll() for each in programs] == [None] * len(programs), "a program has ended"
            time.sleep(0.2)


def test_a_router_and_two_servers(real: ModuleType, model: str) -> None:
    http, control, *ports = free_ports(4)
    router = f"http://127.0.0.1:{http}"
    prompt = [random.Random(1).randrange(3, 512) for _ in range(300)]
    wanted = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0, "return_token_ids": True}

    def answer(where: str) -> list[int]:
        found: list[int] = json.loads(asked(f"{where}/v1/completions", **wanted))["choices"][0]["token_ids"]
        return found

    with ExitStack() as stack:
        told = ["--http", f"127.0.0.1:{http}", "--control", f"tcp://127.0.0.1:{control}"]
        programs = [stack.enter_context(program("aiokv", "router", *told))]
        for role, port in zip(("prefill", "decode"), ports, strict=True):
            where = f"http://127.0.0.1:{port}"
            known = {"address": f"tcp://127.0.0.1:{control}", "role": role, "http": where, "models": ["tiny"]}
            server = program(
                "vllm.entrypoints.openai.api_server",
                *OPTIONS,
                f"--model={model}",
                "--served-model-name=tiny",
                "--host=127.0.0.1",
                f"--port={port}",
                f"--kv-cache-memory-bytes={64 << 20}",
                f"--kv-transfer-config={json.dumps(real.transfer('fail', router=known))}",
            )
            programs.append(stack.enter_context(server))
        moved = once_up(lambda: answer(router), programs)
        figures = asked(f"http://127.0.0.1:{ports[1]}/metrics")
        assert re.search(r"^vllm:aiokv_load_seconds_count\{.*\} 1\.0$", figures, re.MULTILINE)
        # The prefill side alone, which fetched nothing.
        assert answer(f"http://127.0.0.1:{ports[0]}") == moved
