"""`warmroute keys`: keys in the configured database, or in a file."""
