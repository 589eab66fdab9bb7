"""`warmroute status --watch`."""
