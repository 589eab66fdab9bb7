"""Responses in the background."""
