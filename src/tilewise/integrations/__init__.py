"""Where Tilewise meets others: torch's operators, compiler and SDPA, and optional packages, which only their own module
imports.
"""
