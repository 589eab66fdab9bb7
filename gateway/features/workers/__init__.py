"""`workers: N`: a supervisor, its workers, and what they exchange."""
