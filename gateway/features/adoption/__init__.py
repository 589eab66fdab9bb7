"""Re-sent requests get the answer that still runs."""
