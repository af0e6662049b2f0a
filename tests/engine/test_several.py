"""Several readers, several sources, ranks that share out heads differently; priorities."""
