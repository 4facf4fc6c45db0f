"""Who may do what: scopes and principals, token files, JWTs, and rates. Knows no HTTP and no streams' state.

Secrets pass through here and stay here: nothing in this package logs, and no error repeats what it was shown.
"""
