"""Compiled functions that read engines' messages."""
