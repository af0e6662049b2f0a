"""An OpenAI-compatible HTTP router in front of prefill and decode instances that come and go.

A server makes itself known with ``Instance``, which needs nothing beyond aiokv. The router itself,
``aiokv.router.server.Router`` or ``python -m aiokv router``, needs ``pip install 'aiokv[router]'``.
"""

from aiokv.router.instance import Instance
from aiokv.router.messages import Load

__all__ = ["Instance", "Load"]
