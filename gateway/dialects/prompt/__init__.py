"""The canonical prompt: what the engine's template would see, as bytes; the same for one conversation in every dialect."""
