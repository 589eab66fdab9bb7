"""Client dialects: parse a request, make its canonical prompt, write errors in the dialect's own shape."""
