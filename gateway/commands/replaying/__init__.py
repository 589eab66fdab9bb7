"""What `warmroute simulate` reads, and what it asks of a trace: files, recordings, "what if", money, the converter."""
