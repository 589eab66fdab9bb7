"""Observers of settled requests, beside `settle.py`: the access log. Features have their own."""
