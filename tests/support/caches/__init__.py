"""Prefix caches under test: rigs, state machines, oracles, and stores that fail on demand."""
