"""Checkpoints: saved atomically, verified when read, restored, converted and exported."""
