"""The run's effects on Ray: the world into events, actions into effects, and no decisions."""
