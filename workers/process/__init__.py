"""A worker process: its Ray actor, its start, its end."""
