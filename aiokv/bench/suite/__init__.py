"""The benchmarks, a module each; what is in this folder is what ``python -m aiokv.bench`` can run."""
