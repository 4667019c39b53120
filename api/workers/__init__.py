"""The workers: lists, pages, changes of state, and the registration of engines."""
