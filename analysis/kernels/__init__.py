"""The kernels of `audit` and `explain`."""
