"""What is expected of a part, computed in another way."""
