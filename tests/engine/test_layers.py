"""Layer by layer: order, wake-ups, plans over several readers and several sources."""
