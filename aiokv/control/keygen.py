"""``python -m aiokv keygen DIR``: a pair of keys for one engine, or for all engines of one host."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from aiokv.control.keys import Keys

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Run the command; gives its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m aiokv keygen",
        description="Makes a pair of keys: DIR/aiokv.key, which stays here and only its owner can read, and "
        "DIR/aiokv.pub, whose key goes into the file `allowed` of every peer.",
    )
    parser.add_argument("dir", metavar="DIR", help="where to write them; made if it isn't there")
    folder = parser.parse_args(arguments).dir
    try:
        keys = Keys.generate()
        keys.save(folder)
    except OSError as error:
        sys.stderr.write(f"failed: {error}\n")
        return 1
    sys.stdout.write(f"{keys.public}\n")
    return 0
