"""The configuration of a run: schema, sources, and what is wrong with it."""
