"""The live page: its files, and what it reads: requests and sums as they come, decisions, the prefix index."""
