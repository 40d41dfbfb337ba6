"""What the controller writes to the run directory."""
