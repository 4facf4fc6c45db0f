"""One shard: a log, a state machine and the tiers under one owner.

Commands come in, records go to the log, durable records are applied, readers are woken, writers answered. This is
where time, tasks and storage meet; it knows no HTTP.
"""
