"""The learned state of a router as records, with which another router can begin: see `collect.py` and `restore.py`."""
