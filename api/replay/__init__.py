"""The HTTP API over the past: the same application, at any moment of an event log.

Start at `service.ReplayService`, which gives each request its moment. `moments` opens moments and keeps a few of them,
and `routes` has what only the replay has: the extent of the log with its marks, one moment, and the difference of two.
"""
