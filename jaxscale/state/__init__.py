"""The train state, the placements of its leaves, the split of batches, and the canonical form in checkpoints."""
