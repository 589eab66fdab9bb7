"""Delta uploads: what they save on a slow link, and what they cost."""
