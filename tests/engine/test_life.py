"""Life of an engine: entering, leaving, idling, starting again."""
