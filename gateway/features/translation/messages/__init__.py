"""Translation between Anthropic's Messages and OpenAI's chat."""
