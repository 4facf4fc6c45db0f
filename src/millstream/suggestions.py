"""What a misspelt name was probably meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """ "did you mean 'append'?", or None if nothing that is known looks like the word."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f"did you mean {close[0]!r}?" if close else None
