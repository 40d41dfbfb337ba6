"""Which node protects whose snapshots, and how. Pure."""
