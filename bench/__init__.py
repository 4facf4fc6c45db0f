"""Side-by-side benchmarks of millstream and its peers; see README.md. Run with `python -m bench`."""
