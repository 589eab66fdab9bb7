"""`workers: N`: a supervisor, its workers, and the messages between them."""
