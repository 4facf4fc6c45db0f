"""Access control: scopes and principals, token files, JWTs, and rates. Knows no HTTP and no state of streams.

Secrets must not leave this package: nothing here logs, and no error repeats the credentials it was given.
"""
