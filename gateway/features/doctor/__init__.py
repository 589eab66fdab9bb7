"""The prefix doctor: where the prefixes of a stream of requests break, why, and what it costs."""
