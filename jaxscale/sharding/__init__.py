"""Where arrays live: MeshSpec, AxisRules, ZeRO, constrain."""
