"""The jobs: what happens to the data in bulk, each a function on a Spark session.

They know the file formats of the cold tier, the data source and the server's HTTP interface, and nothing of the
server's insides. Every job may be run again at any time, and while the server takes writes.
"""
