"""The compiled function that receives messages."""
