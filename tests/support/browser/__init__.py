"""The page in a real browser, and a simulated fleet that it shows."""
