"""Servers that tests can start, kill and restart."""
