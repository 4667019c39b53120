"""Kernels of the pages that are booked. Start at `booked`."""
