"""The run as a value: what the controller knows, and nothing else. Pure."""
