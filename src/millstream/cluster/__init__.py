"""The cluster: brokers, membership and leases, who leads a shard and who follows.

Consensus, replication and storage are the broker's. Here is only what turns them into leadership: who should lead is
decided by leases, who does by the log's fence. Knows no HTTP.
"""
