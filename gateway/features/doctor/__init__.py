"""The prefix doctor: finds where the prefixes of a stream of requests break, why, and at what cost."""
