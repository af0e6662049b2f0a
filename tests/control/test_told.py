"""What is logged once."""

from __future__ import annotations

import logging

from aiokv.control import told
from aiokv.control.told import Told


def test_the_same_of_the_same_peer_is_told_once():
    known = Told()
    assert [known.level("a", "x"), known.level("a", "y"), known.level("b", "x")] == [logging.INFO] * 3
    assert [known.level("a", "x"), known.level("b", "x")] == [logging.DEBUG] * 2


def test_what_is_remembered_has_an_end(monkeypatch):
    monkeypatch.setattr(told, "_MOST", 3)
    known = Told()
    levels = [known.level(str(each), "x") for each in range(5)]
    assert levels == [logging.INFO] * 3 + [logging.DEBUG] * 2
    assert len(known._told) == 3
