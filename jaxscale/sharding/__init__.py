"""Placement of arrays: MeshSpec, AxisRules, ZeRO, constrain."""
