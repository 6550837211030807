"""Checks of the traced and the compiled step: each technique that was asked for must show in it."""
