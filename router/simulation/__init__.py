"""A simulated fleet, and workloads to replay on it."""
