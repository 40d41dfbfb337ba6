"""What must never happen, checked against the truth of the virtual cluster."""
