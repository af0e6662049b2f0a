"""aiokv for callers that have no event loop: the same names, in a thread of their own.

What is called is called as before, and what is awaited gives a ``Future`` in its place, which is one of
``concurrent.futures``; ``async with`` becomes ``with``, and ``async for`` becomes ``for``. ::

    from aiokv import blocking

    with (
        blocking.TransferEngine(aiokv.TransferEngine(cache, bind="tcp://127.0.0.1:0")) as engine,
        blocking.HostTier(aiokv.HostTier(cache, "64GiB"), thread=engine.thread) as tier,
    ):
        kept = tier.store(hashes, blocks)
        with engine.fetch("id", others, sources=[address]):
            ...
        print(kept.result())

One thread runs the loop of any number of engines and tiers, and sleeps as long as nothing happens. Everything
here may be called from any thread but that one.
"""

from aiokv.blocking.engine import Fetch, Offer, TransferEngine
from aiokv.blocking.thread import Future, LoopThread
from aiokv.blocking.tier import HostTier, Lookup

__all__ = ["Fetch", "Future", "HostTier", "Lookup", "LoopThread", "Offer", "TransferEngine"]
