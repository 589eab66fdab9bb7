"""Translation of other dialects to OpenAI's chat, for replicas that support only that."""
