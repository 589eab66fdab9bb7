"""What the data plane costs."""
