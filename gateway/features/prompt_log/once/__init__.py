"""Generations that belong to a token of their client, and not to its connection."""
