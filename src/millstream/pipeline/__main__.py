"""`python -m millstream.pipeline JOB …`, and what `spark-submit` runs: this file, with the job as its argument."""

from __future__ import annotations

import sys

from millstream.cli.main import run_and_leave

if __name__ == "__main__":
    run_and_leave(["pipeline", *sys.argv[1:]])
