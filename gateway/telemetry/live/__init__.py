"""What the live page shows of this process's requests: the last of them while somebody watches, and sums over time."""
