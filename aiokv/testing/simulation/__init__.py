"""Real engines in a simulated world: seeded faults, virtual time, and every byte checked.

One seed is one scenario: which engines there are and how their caches are laid out, who offers and fetches
what and when, who gives up or misbehaves, and what the world does to them. Engines, tables, sessions,
pollers and copy plans are the real ones; the control channel, the transports, the devices and the clock are
those of the test kit. A seed takes some tens of milliseconds, and does the same each time::

    python -m aiokv.testing.simulation --seeds 2000 --jobs 4
    python -m aiokv.testing.simulation --one 1245 -v
    python -m aiokv.testing.simulation --shrink 1245

``--one`` plays a seed again and tells all that happened, ``--shrink`` looks for what a failure needs.

What is checked: transfers end, on both sides, in one outcome and by their deadlines and the drain bound; a
producer's LANDED is the consumer's; bytes are what the fake model wrote, and nothing else is touched; blocks,
which are overwritten the moment they are given back, are quiet by then; nobody reads or writes what another
stream still works on; well-meant transfers end well where nothing went wrong, and after all is healed; at the
end no lease, task, timer, watch or link is left.

What is not: threads (``layer_ready`` comes from the loop), lies of peers, what real transports and GPUs do.
"""

from aiokv.testing.simulation.drawing import draw
from aiokv.testing.simulation.run import Report, play, run_seed
from aiokv.testing.simulation.scenario import Scenario

__all__ = ["Report", "Scenario", "draw", "play", "run_seed"]
