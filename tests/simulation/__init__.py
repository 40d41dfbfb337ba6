"""A virtual cluster in virtual time that drives the real machine; one seed is one history."""
