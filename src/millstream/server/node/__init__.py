"""A process that serves: its assembly, start, reload and stop."""
