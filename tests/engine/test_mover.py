"""The mover: which chunk is submitted when, what completions mean, and when a part is quiet."""
