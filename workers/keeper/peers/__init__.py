"""Keepers of other nodes: byte ranges over TCP, and copies of their snapshots."""
