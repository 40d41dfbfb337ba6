"""The virtual cluster: nodes, processes, memory, storage."""
