"""Features: each package can be removed, and the core runs without it."""
