"""What requests mean: routes, the front that all of them pass, and the handlers over a shard."""
