"""Where bytes and state live: hot tails in memory, the catalog on disk.

The tiers store and find; they do not decide. They know keys, incarnations, offsets and positions, not requests.
"""
