"""How often to save, and how saved state is protected. Pure."""
