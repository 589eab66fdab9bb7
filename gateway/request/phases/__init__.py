"""The phases of a request's life, one file each; `lifecycle.py` calls them in their order."""
