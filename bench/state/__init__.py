"""What it costs to keep responses."""
