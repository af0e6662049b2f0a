"""Order on the device: what is written waits for the caller's stream, and what the caller enqueues later sees it."""
