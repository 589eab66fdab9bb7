"""Cache events of engines: what they hold, block by block."""
