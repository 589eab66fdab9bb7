"""Warm starts: what the routers know, in a file or from another gateway."""
