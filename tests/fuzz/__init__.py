"""Hostile bytes for every decoder."""
