"""What the benchmarks of a GPU are made of, and what aiokv is compared with there."""
