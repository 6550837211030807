"""What the backward pass keeps of the forward pass."""
