"""Adapters for routers that people run. Each asks kvsight where a request goes, and lets the router do the rest."""
