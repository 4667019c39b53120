"""The kernels that find the parts of a body, and read its numbers."""
