"""`python -m millstream`: the command line."""

from __future__ import annotations

from millstream.cli.main import entry

if __name__ == "__main__":
    entry()
