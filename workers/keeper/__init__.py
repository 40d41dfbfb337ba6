"""The keeper: one per node, outside the trainers. It watches their processes and speaks for the node."""
