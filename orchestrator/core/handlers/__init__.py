"""What each event changes. Pure."""
