"""Labels that a user puts on metrics."""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["checked_labels"]

#: What Prometheus takes for one; it keeps those that begin with two underscores for itself.
_LABEL = re.compile(r"(?!__)[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def checked_labels(labels: Mapping[str, str] | None) -> dict[str, str]:
    """Labels that can be shown: with one that can't, no scrape of the registry would work any more."""
    if labels is not None and not isinstance(labels, Mapping):
        raise TypeError(f"labels is a mapping of names to values, not {labels!r}")
    found = dict(labels or {})
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"labels has names and values that are strings, not {name!r}: {value!r}")
        if not _LABEL.fullmatch(name):
            raise ValueError(
                f"labels has the name {name!r}: names are letters, digits and _, and begin with none of "
                "the digits and not with __"
            )
    return found
