"""Connections to Kafka, and what kvsight asks of its topics."""
