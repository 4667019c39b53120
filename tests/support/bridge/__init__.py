"""A bridge whose results can be inspected, and a slow decoder to compare with."""
