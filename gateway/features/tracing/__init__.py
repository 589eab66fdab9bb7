"""Which requests are traced, what is noted while one runs, and the spans that are made of it when it has ended."""
