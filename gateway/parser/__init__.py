"""Parsing of large bodies outside the event loop: one parser process per gateway process."""
