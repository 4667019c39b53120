"""Routing decisions: their route, and the counts of the last hour."""
