"""What streams are: commands are checked against state, become log records, and records change state.

Deterministic: the same records in the same order give the same state on every machine. Knows no HTTP, no disk,
no clock; whatever varies (time, chance) arrives inside a command or a record.
"""
