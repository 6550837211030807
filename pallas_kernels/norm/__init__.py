"""RMS norm and layer norm, of x or of x plus a residual; see api.py."""
