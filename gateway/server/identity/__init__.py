"""Keys towards operators."""
