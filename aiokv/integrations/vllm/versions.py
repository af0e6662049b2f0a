"""Which releases of vLLM the connector is made for, and what it says to others."""

from __future__ import annotations

import logging
import re

__all__ = ["SUPPORTED", "check_complete", "check_version", "differs", "missing"]

_log = logging.getLogger("aiokv")

#: Releases whose calls of a connector were read, from the oldest to the newest.
SUPPORTED = ("0.32", "0.33")
_NAMED = " and ".join(SUPPORTED)


def check_version(version: str) -> None:
    """Refuse a vLLM that is too old; of one that is newer, or doesn't say what it is, warn.

    A newer one may well call a connector as those before it did. Where it doesn't, and that can be told,
    ``check_complete`` and the import of what is gone refuse it.

    Args:
        version: What vLLM says that it is: ``"0.32.1"``, ``"0.33.1rc1.dev5+g0123abc.cpu"``.

    Raises:
        ImportError: It is older than those that are supported.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    # A vLLM that was built without its tags calls itself 0.1.dev1+g0123abc, whatever it is.
    release = None if version.startswith("0.1.dev") else found and (int(found[1]), int(found[2]))
    oldest, newest = (tuple(map(int, each.split("."))) for each in (SUPPORTED[0], SUPPORTED[-1]))
    if release and release < oldest:
        raise ImportError(f"AioKVConnector is made for vLLM {_NAMED}; this is {version}, which is older")
    if not release or release > newest:
        _log.warning("AioKVConnector is made for vLLM %s, and was never tried with %s", _NAMED, version)


def missing(error: ImportError) -> ImportError:
    """An error for a vLLM that isn't there."""
    return ImportError(f"AioKVConnector is made for vLLM {_NAMED}, which isn't here: {error}")


def differs(version: str, how: object) -> ImportError:
    """An error for a vLLM whose interface isn't the one that the connector is made for."""
    return ImportError(f"AioKVConnector is made for vLLM {_NAMED}; this is {version}, which differs: {how}")


def check_complete(connector: type, version: str) -> None:
    """Refuse a vLLM that asks for what the connector doesn't have.

    Raises:
        ImportError: A method is missing, which is named.
    """
    missing = sorted(getattr(connector, "__abstractmethods__", ()))
    if missing:
        raise differs(version, f"it asks for {', '.join(missing)}")
