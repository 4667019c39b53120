"""Compiled functions that several packages share, and how kernels are declared, compiled and kept."""
