"""The bell: wakes all who wait, and carries nothing."""
