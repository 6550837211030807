"""Kernels written in Pallas: a package of its own that imports nothing of jaxscale, and can be used without it.

It holds no kernel yet. Attention on TPU runs the splash kernel that comes with JAX
(`jaxscale/layers/attention_splash.py`); every other layer is plain JAX.
"""
