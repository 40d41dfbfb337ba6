"""A finished or running run as one HTML page."""
