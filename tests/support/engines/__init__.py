"""Engines as the bridge sees them: what they publish, by hand and by their own released code."""
