"""Which blocks go first when room is needed, and which are worth keeping at all.

``policy_named`` knows those that come with aiokv; ``Policy`` is what one of your own has to have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from aiokv.offload.policies.admission import Admission, SecondSight
from aiokv.offload.policies.arc import Arc
from aiokv.offload.policies.base import Key, Policy
from aiokv.offload.policies.lru import Lru

__all__ = ["Admission", "Arc", "Key", "Lru", "Policy", "SecondSight", "policy_named"]

_NAMED: Mapping[str, Callable[[], Policy]] = MappingProxyType({"arc": Arc, "lru": Lru})


def policy_named(policy: str | Policy) -> Policy:
    """A policy by its name; one that is made already is taken as it is.

    Raises:
        ValueError: There is none of this name.
        TypeError: It is no policy.
    """
    if isinstance(policy, str):
        made = _NAMED.get(policy)
        if made is None:
            raise ValueError(f"policy is one of {', '.join(_NAMED)}, or one of your own, not {policy!r}")
        return made()
    if not isinstance(policy, Policy):
        raise TypeError(f"policy is a name, or has what aiokv.offload.policies.Policy has, not {policy!r}")
    return policy
