"""What requests mean: the routes, the front that every request passes, and the handlers over a shard."""
