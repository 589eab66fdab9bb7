"""Serving through the public API of aiohttp alone, where a release has moved what `aiohttp_seam.py` uses beside it."""
