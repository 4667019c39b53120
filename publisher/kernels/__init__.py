"""Compiled functions of the ledger and the queue of changes."""
