"""Event-log files: segments, their index by time, retention, and readers."""
