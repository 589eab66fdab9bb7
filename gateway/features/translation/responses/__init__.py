"""OpenAI's Responses in the words of OpenAI's chat."""
