"""RMS norm and layer norm, with or without a residual added first: see api.py."""
