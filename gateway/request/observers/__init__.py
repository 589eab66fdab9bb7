"""Observers of requests' ends beside those of `settle.py`: the log. Those of features are in their packages."""
