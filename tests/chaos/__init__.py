"""Real processes under load, one failure after the other: nothing is lost, and nothing is left behind."""
