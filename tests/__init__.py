"""Tests of kvsight, and `support`, what they share."""
