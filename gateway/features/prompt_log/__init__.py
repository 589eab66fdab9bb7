"""The prompt log: one name for a conversation, which clients and the gateway compute alike (`docs/prompt-log.md`)."""
