"""From the body of a query to its answer."""
