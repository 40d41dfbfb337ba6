"""A simulated cluster on this machine, and faults made on purpose."""
