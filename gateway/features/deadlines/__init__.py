"""Deadlines of requests: the time that a client allows for an answer."""
