"""The canonical form of a train state, in which it is saved whatever the plan."""
