"""Engines as the bridge sees them, with events made by hand or by the engines' released code."""
