"""The kernel of selections over direct connections. Start at `select`."""
