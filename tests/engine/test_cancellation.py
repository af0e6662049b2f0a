"""A task cancelled at each of its awaits: what comes out, what stays behind (nothing), and what the peer sees."""
