"""What aiokv is tested with, for your tests, too. ``docs/testing.md`` shows each of it at work.

Import the module that you need; only ``plugin`` imports pytest.

To test code that uses aiokv, without a GPU, a network, or time:

* ``pairs``: engines of one process. ``connected_pair`` is two that have met, ``Engines`` any number,
  ``check_idle`` asserts that nothing is held any more, ``virtual_time`` runs an async test in no time.
* ``cancelling``: cancels a task at any one of its awaits, to see that it leaves nothing behind there.
* ``virtual``: event loops in virtual time. What takes a minute happens in a millisecond, the same way each
  time; a deadlock is an error that says who waits for what.
* ``plugin``: fixtures for pytest, for who asks for them: ``pytest_plugins = ["aiokv.testing.plugin"]``.
* ``faultynetwork``: ``FaultyNetwork``, a control plane that drops, doubles, delays and reorders frames, by a
  seed or as told, and whose links are cut and engines killed.
* ``aiokv.device.mocked``: ``MockedDevice``, whose streams are stepped by hand or in an order drawn from a
  seed, and which notes every access that no event orders.
* ``ranks``: ``MemoryRanks``, ranks of a group in one process, which may be late or lost.
* ``tables``: the protocol alone. Transfer tables joined by their sessions, without loop, bytes or clock.

To test a transport, a channel or a device of your own: suites of async functions, ``CASES``, that run under
any test framework and event loop, and that aiokv's own pass.

* ``conformance.transports``, with a ``conformance.transportkit.TransportKit`` that makes yours.
* ``conformance.channels``, with a ``conformance.channelkit.ChannelKit`` that makes yours.
* ``conformance.ranks``, which every rank of a group runs with its ``RankGroup``.
* ``conformance.devices``, with a ``conformance.devicekit.DeviceKit`` that makes yours.

To look for what nobody thought of:

* ``simulation``: whole clusters, drawn, run and judged by one seed: ``simulation.run.run_seed(seed)``.
* ``fuzz``: nonsense for decoder and ports: ``fuzz.decoder.fuzz(cases, seed)``.
* ``soak``: real processes that are killed, stopped and cut off: ``python -m aiokv.testing.soak``.
"""
