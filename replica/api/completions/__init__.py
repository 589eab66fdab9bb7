"""Chat and text completions, as OpenAI and vLLM have them."""
