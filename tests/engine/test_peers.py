"""Peers: greetings, sessions that end, other versions, restarts, aliases, and one that doesn't read."""
