"""Memory that outlives a trainer: arenas of slots, and the versions in them."""
