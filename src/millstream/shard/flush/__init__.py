"""The flush: the log up to a position becomes cold, and the catalog moves to that position.

`flusher.py` decides when, and runs the four steps in order; each has a file: `capture.py`, `store.py`, `seal.py` and
`apply.py`. Beside them: `workers.py` says where heavy jobs run, `memory.py` lets go of what is cold, `unlisted.py`
knows the objects that the catalog does not list yet, and `full_manifests.py` writes the whole catalog now and then.
"""
