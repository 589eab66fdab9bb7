"""The clients' connections: how they are accepted, read, answered and ended."""
