"""Anthropic's Messages in the words of OpenAI's chat, and back."""
