"""`warmroute keys`."""
