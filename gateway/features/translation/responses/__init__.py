"""Translation of OpenAI's Responses to OpenAI's chat."""
