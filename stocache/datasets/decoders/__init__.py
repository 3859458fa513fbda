"""What decoders of libraries return, cached by the content that they decode."""
