"""The first day with kvsight, from an empty broker to a broker that comes back, on one machine without containers."""
