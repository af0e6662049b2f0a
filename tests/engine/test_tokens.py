"""Which tokens move: one, a whole block, a part of one; what is there already is left alone."""
