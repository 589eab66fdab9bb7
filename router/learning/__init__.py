"""What is learned from answers: speeds, scales, restarts and cache sizes."""
