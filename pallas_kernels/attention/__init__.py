"""Softmax attention: see api.py."""
