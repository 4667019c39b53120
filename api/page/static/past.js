// The page over the past.
