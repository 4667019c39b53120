"""Commands that read and write event logs. Start at `reading`, which they share."""
