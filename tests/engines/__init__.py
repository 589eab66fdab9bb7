"""Real engines behind a gateway: `make test-engines`."""
