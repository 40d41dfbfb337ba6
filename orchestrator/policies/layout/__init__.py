"""Which layout the healthy workers take. Pure."""
