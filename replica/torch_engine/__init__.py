"""The real engine: transformers' continuous batching, its tokenizer and sampling, and the patches around it."""
