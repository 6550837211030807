"""Traced programs as data, without a device: FLOP, block graphs, flat lists of operations, placements."""
