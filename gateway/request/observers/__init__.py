"""Observers of requests' ends beside those of `settle.py`: the log, and what is optional (`gateway/observing.py`)."""
