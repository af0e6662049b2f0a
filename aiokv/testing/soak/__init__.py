"""Real processes that transfer for minutes or hours while they are killed, stopped, cut off and cancelled.

``python -m aiokv.testing.soak --minutes 30`` starts workers that are engines and a parent that tells them
what to do, does things to them, and judges: no wrong byte, no transfer that outlives its deadline and the
drain bound, nothing that piles up in workers that live long, no process left behind. It ends with 1 where
one of these happened. Linux only.

* ``run``: the parent's loop, from its start to the verdict.
* ``faults``: what is done to workers and their connections.
* ``judge``: every transfer, and what became of it on both sides.
* ``slots``: a place where one worker after the other lives, at one address.
* ``proxy``: the connections that lead there, and can be cut and stalled.
* ``nursery``: where the processes come from, and how it is made sure that they end.
* ``worker``, ``store``: one engine, its cache, and what is checked there.
* ``orders``: what parent and workers say to each other.
"""
