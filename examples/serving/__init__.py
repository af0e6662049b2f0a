"""What the serving examples need beside aiokv: a model, paged attention, blocks, a request channel."""
