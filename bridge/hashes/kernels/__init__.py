"""Compiled functions that turn an engine's block hashes into sequence hashes."""
