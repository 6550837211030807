"""Host memory: weights streamed to the device, and optimizer state updated there or slice by slice."""
