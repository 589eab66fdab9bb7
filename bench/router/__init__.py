"""What decisions cost, and how good they are."""
