"""How parameters move: optimizers as values over optax."""
