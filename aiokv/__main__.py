"""``python -m aiokv COMMAND``: what a person does with aiokv at a terminal.

Each command is a ``main`` of its own, imported when it is asked for.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from types import MappingProxyType

#: Where each command's ``main(arguments)`` is, and what it is for.
_COMMANDS = MappingProxyType(
    {
        "bench": ("aiokv.bench.__main__", "measure aiokv beside what it is compared with"),
        "doctor": ("aiokv.doctor.command", "what this machine can do, and how to mend what it can't"),
        "keygen": ("aiokv.control.keygen", "a pair of keys, so that engines talk to those they know only"),
        "pool": ("aiokv.commands.pool", "host memory for KV blocks that several processes share"),
        "router": ("aiokv.router.command", "an OpenAI-compatible router for prefill and decode servers"),
        "trace": ("aiokv.tracing", "put traces of several processes into one file"),
    }
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; gives its exit status."""
    parser = argparse.ArgumentParser(prog="python -m aiokv", description="aiokv moves LLM KV cache.")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    for name, (_, purpose) in _COMMANDS.items():
        # What follows the name is the command's own, --help included.
        commands.add_parser(name, help=purpose, add_help=False, prefix_chars="\0")
    given, rest = parser.parse_known_args(arguments)
    command = import_module(_COMMANDS[given.command][0])
    try:
        status: int = command.main(rest)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read it has had enough, as `head` does. What is left is not to be tried again at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
