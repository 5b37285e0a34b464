"""Tilewise."""
