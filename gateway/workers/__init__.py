"""`workers: N`: several processes that are one gateway."""
