"""What keys have used, from worker to worker."""
