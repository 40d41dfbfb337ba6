"""The run's effects on Ray: it turns the world into events and actions into effects, and decides nothing."""
