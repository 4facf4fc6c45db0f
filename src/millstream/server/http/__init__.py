"""HTTP itself: the adapters, the messages that handlers see, and the limits on both. Knows no streams."""
