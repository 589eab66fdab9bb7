"""From an engine's tokens to an answer's text: incremental decoding, stop strings, scores, several answers at once."""
