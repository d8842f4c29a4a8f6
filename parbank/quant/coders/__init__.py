"""Coders: integers to few bytes and back."""
