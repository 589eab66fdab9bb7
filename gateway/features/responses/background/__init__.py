"""Responses that run in the background: their objects, their events, their streams told again."""
