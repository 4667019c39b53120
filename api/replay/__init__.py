"""The HTTP API over the past: the same routes, at any moment of an event log.

Start at `app.create_past_app`. `moments` opens moments and keeps a few of them, `at` gives each request its moment, and
`routes` has what only the past has: the span of the log with its marks, one moment, and the difference of two.
"""
