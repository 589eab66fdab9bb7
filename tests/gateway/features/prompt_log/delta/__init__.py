"""Delta uploads."""
