"""Choosing the data path: the best that both have and that proves itself."""
