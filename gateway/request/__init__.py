"""One request's life, from its parsed body to its log line. Knows no socket."""
