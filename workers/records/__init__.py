"""What a process records of itself, readable from outside after it stopped or died."""
