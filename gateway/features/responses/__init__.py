"""Stored responses, conversations and background responses of OpenAI's Responses API."""
