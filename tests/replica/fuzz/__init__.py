"""Bodies of all sizes and shapes to a replica in a process of its own, whose /health, memory and blocks are watched."""
