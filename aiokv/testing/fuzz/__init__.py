"""Nonsense for everything that takes bytes from elsewhere; nothing but the documented errors may come of it.

Each kind is a module with a function ``fuzz(cases, seed) -> Counter[str]``, which counts what happened and
raises an AssertionError that names the seed where something happened that must not:

* ``decoder``: frames, messages, block lists and copy plans, without a loop.
* ``control``: the control port of a live engine, beside a good peer that goes on.
* ``data``: the data ports of a live engine.

``python -m aiokv.testing.fuzz --cases N --seed S --what decoder``
"""
