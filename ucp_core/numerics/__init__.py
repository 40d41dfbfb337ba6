"""Numbers in bytes: checksums, dtypes and casts. Pure."""
