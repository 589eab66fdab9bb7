"""Parsing of bodies that are too much for the event loop: a helper process, one for each process that serves."""
