"""Runs in the background: stored step by step, so that another gateway continues the runs of a stopped gateway."""
