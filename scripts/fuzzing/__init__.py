"""The parts of `python -m scripts.fuzz`."""
