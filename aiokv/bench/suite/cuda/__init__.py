"""What benchmarks of the host measure with ``--device cuda``: modules of the same names."""
