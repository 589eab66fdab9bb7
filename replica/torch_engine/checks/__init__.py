"""What is checked of a model before it serves: that its answers are those of plain transformers."""
