"""The canonical prompt: the input of the engine's chat template as bytes, equal for one conversation in every dialect."""
