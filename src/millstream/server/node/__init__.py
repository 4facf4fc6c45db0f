"""A server process: its assembly, start, reload and stop."""
