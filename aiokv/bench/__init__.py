"""Benchmarks: each measures aiokv beside what it is compared with, in one run.

``python -m aiokv.bench --help`` says how to run them; docs/benchmarks.md says how to read and how to add one.
"""
