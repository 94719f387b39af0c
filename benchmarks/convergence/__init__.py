"""Does training converge like AdamW? Validation losses of small models under every method."""
