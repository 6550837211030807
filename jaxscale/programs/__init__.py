"""A program as data: FLOP, block graphs, one flat list of operations, placements, without a device."""
