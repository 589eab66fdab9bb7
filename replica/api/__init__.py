"""OpenAI's and vLLM's HTTP API, the same for both engines."""
