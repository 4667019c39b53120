"""The kernels of the fast path."""
