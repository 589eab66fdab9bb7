"""Access to a replica: its key, TLS, and connections to fragile servers."""
