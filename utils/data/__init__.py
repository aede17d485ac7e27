"""Text: corpora, tokens, windows."""
