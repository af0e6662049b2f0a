"""The pieces of an engine by name or address."""
