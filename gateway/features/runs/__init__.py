"""Requests that run without a client connection."""
