"""Metrics, request logs and traces of the service."""
