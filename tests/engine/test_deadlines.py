"""Deadlines, liveness, first contact and the bound of draining, in virtual time."""
