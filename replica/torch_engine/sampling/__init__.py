"""The next token of an answer: penalties, grammars, and the draw."""
