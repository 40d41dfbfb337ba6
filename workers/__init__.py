"""One training process per GPU and one keeper per node."""
