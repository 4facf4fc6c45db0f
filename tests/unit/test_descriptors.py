"""Open files have an owner, and are closed once."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from millstream.descriptors import Descriptor


def test_a_file_closed_twice_is_closed_once_and_its_number_may_be_anothers(tmp_path: Path) -> None:
    first = Descriptor(tmp_path / "a", os.O_RDWR | os.O_CREAT)
    number = first.number
    first.close()
    second = Descriptor(tmp_path / "b", os.O_RDWR | os.O_CREAT)
    assert second.number == number, "the system gives the lowest free number"
    first.close()
    assert os.fstat(second.number)
    assert first.number == -1
    second.close()
    with pytest.raises(OSError):
        os.fstat(number)


def test_a_close_that_reports_an_error_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Linux the number is free by then, whatever close says."""
    closed: list[int] = []
    close = os.close

    def failing(number: int) -> None:
        closed.append(number)
        close(number)
        raise OSError(errno.EIO, "Input/output error")

    file = Descriptor(tmp_path / "a", os.O_RDWR | os.O_CREAT)
    monkeypatch.setattr(os, "close", failing)
    with pytest.raises(OSError, match="Input/output"):
        file.close()
    file.close()
    assert len(closed) == 1
