"""Log-probabilities and entropies of tokens from logits, on every backend."""
