"""Durable storage of records: one interface, and the logs that implement it.

A log stores batches in the order given and knows of their content only the positions they cover. It must not know
what a record, a stream or a request is.
"""
