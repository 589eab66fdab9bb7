"""Streams of server-sent events: as bytes, event by event, by name."""
