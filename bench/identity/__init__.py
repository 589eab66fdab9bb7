"""What it costs to know who sends a request."""
