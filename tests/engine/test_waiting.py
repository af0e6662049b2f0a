"""Waiting: several waiters, failures that nobody awaits, what a handle tells."""
