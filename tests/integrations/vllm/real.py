"""Real vLLMs for tests: a model of 2.6 million random weights, and instances in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["Instance", "left_free", "make_hybrid", "make_latent", "make_model", "started", "transfer"]


SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,  # else all tokens are about as likely, and no answer says anything
}


def make_model(folder: Path) -> str:
    """Write a Llama there; requests are tokens, so its tokenizer is for servers alone, which want one."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(512)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    return str(folder)


def make_hybrid(folder: Path) -> str:
    """Write a Gemma there, every other layer of which has a sliding window of 128 tokens."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(**SIZES, sliding_window=128, layer_types=kinds, query_pre_attn_scalar=64)
    Gemma3ForCausalLM(config).save_pretrained(folder)
    return str(folder)


def make_latent(folder: Path) -> str:
    """Write a DeepSeek-V2 without experts there; the CPU's kernel for MLA wants vectors of 512 and 64."""
    import torch
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    torch.manual_seed(0)
    heads = {"qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64, "num_key_value_heads": 4}
    config = DeepseekV2Config(
        **{**SIZES, **heads}, kv_lora_rank=512, q_lora_rank=None, first_k_dense_replace=4
    )
    DeepseekV2ForCausalLM(config).save_pretrained(folder)
    return str(folder)


def transfer(policy: str = "recompute", **extra: object) -> dict[str, object]:
    """A ``--kv-transfer-config``."""
    return {
        "kv_connector": "AioKVConnector",
        "kv_connector_module_path": "aiokv.integrations.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": extra,
    }


class Instance:
    """One vLLM in a process of its own; see ``instance.py``."""

    def __init__(self, model: str, config: dict[str, object] | None = None, **options: object) -> None:
        program = Path(__file__).with_name("instance.py")
        given = json.dumps(config) if config else ""
        self.process = subprocess.Popen(
            [sys.executable, str(program), model, given, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._heard: list[dict[str, Any]] = []
        self._count = 0
        #: Where its engines are reached, once somebody found out.
        self.addresses: list[str] = []

    def tell(self, do: str, **given: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **given}) + "\n")
        self.process.stdin.flush()

    def hear(self, **wanted: object) -> dict[str, Any]:
        """The first event that is so, waited for; others are kept for whoever asks for them."""
        assert self.process.stdout is not None
        while True:
            for event in self._heard:
                if all(event.get(key) == value for key, value in wanted.items()):
                    self._heard.remove(event)
                    return event
            line = self.process.stdout.readline()
            if not line:
                raise RuntimeError(f"the instance ended with {self.process.wait()}")
            if line.startswith("@"):
                self._heard.append(json.loads(line[1:]))

    def add(self, prompt: list[int], tokens: int = 16, params: dict[str, Any] | None = None) -> str:
        """A request; gives its name."""
        self._count += 1
        name = f"request-{self._count}"
        self.tell("add", name=name, prompt=prompt, tokens=tokens, params=params)
        return name

    def over(self, name: str) -> dict[str, Any]:
        return self.hear(event="over", name=name)

    def answers(self, prompts: list[list[int]], params: list[dict[str, Any] | None]) -> list[list[int]]:
        """What it answers to all of them at once."""
        names = [self.add(prompt, params=each) for prompt, each in zip(prompts, params, strict=True)]
        return [self.over(name)["tokens"] for name in names]

    def prefill(self, prompts: list[list[int]], **params: object) -> list[dict[str, Any]]:
        """Compute prompts and leave their KV here; gives what the decode side is told."""
        names = [self.add(prompt, 1, {"do_remote_decode": True, **params}) for prompt in prompts]
        return [self.over(name)["params"] for name in names]

    def state(self) -> dict[str, Any]:
        self.tell("state")
        return self.hear(event="state")

    def figures(self) -> dict[str, float]:
        """What its Prometheus endpoint shows of the connector, without ``vllm:aiokv_``."""
        self.tell("figures")
        said = self.hear(event="figures")
        return {key.removeprefix("vllm:aiokv_"): value for key, value in said.items() if key != "event"}

    def reset(self, *, connector: bool = False) -> bool:
        """Forget all prefixes, of the host tier, too, if that is asked for; False: it could not."""
        self.tell("reset", connector=connector)
        well: bool = self.hear(event="reset")["well"]
        return well

    def until(self, reached: Callable[[dict[str, Any]], bool]) -> None:
        """Wait for a state."""
        while not reached(self.state()):
            time.sleep(0.02)

    def until_free(self) -> None:
        """Wait until no block is held, and no request known."""
        self.until(lambda state: state["held"] == 0 and not state["requests"])

    def kill(self) -> None:
        self.process.kill()
        self.close()

    def close(self) -> None:
        """End it, and wait for that."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with self.process.stdin, self.process.stdout:
            pass
        self.process.wait()


@contextmanager
def started(model: str, config: dict[str, object] | None = None, **options: object) -> Iterator[Instance]:
    """An instance, once it is up: one after the other, as all need the same cores."""
    instance = Instance(model, config, **options)
    try:
        instance.hear(event="up")
        yield instance
    finally:
        instance.close()


@contextmanager
def left_free(*instances: Instance, connector: bool = False) -> Iterator[None]:
    """Nothing is cached at the start (in a host tier neither, if asked for), and no block held at the end."""
    for each in instances:
        assert each.reset(connector=connector)
    yield
    for each in instances:
        each.until_free()
