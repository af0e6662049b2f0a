"""What the benchmark of the host tier is made of."""
