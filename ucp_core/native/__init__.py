"""Our own distributed checkpoints: save a rank, commit, find, open, load."""
