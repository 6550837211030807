"""Numbers of few bits: codes and scales, quantized optimizer state, split weights, products of layers."""
