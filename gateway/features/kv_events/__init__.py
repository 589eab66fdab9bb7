"""Cache events of engines: their blocks."""
