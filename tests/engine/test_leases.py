"""Which blocks are in use: counted, taken whole or not at all, given back once."""
