"""Background responses: their objects, events and replayed streams."""
