"""What a router knows, as records that another one can begin with: see `collect.py` and `restore.py`."""
