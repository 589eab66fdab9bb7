"""The live page: its files, and its data: recent requests, sums, decisions and the prefix index."""
