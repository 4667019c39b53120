"""Recording: copies the records of sources into an event log, in a process of its own or beside the service.

`recorder.Recorder` owns the log and writes it, `recorder.RecordingThread` runs it beside an event loop that it must not
hold up, and `feed.Feed` says what of a source is recorded.
"""
