"""How a replica is connected to: its key, TLS, and what its server survives."""
