"""The cluster: brokers, membership and leases, who leads a shard and who follows.

The broker provides consensus, replication and storage. This package turns them into leadership: leases decide which
node should lead a shard, and the fence in the log decides which node does lead it.
"""
