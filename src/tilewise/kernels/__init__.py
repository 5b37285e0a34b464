"""CUDA sources: tile/ is the vocabulary, prefill/, decode/ and common/ are the product."""
