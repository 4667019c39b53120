"""Fuzzing of every decoder with hostile bytes."""
