"""Other dialects in the words of OpenAI's chat, for replicas that speak only that."""
