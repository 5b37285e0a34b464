"""Trees of tokens for training: sequences that share beginnings, packed so that what they share stands there once.

tree.py has `TokenTree`; trie.py finds what sequences share, structure.py what follows from nodes and their parents, by
tensor operations that wait for nothing; losses.py what is computed per token; pictures.py is for people.
"""

from tilewise.trees.tree import TokenTree

__all__ = ["TokenTree"]
