"""Learning from answers: speeds, scales, restarts and cache sizes."""
