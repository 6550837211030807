"""Compilation ahead of time for a machine that need not be attached, and what a compiled program holds and sends."""
