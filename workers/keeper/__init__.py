"""The keeper: one per node, outside the trainers; it watches them and speaks for the node."""
