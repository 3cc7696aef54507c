"""Engines: what makes, snapshots and destroys machines. See `base`."""
