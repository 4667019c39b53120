"""Servers that tests start, each with the means to kill and restart it."""
