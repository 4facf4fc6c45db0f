"""The command line: `python -m bench [benchmark …]`. Progress goes to stderr, the summary to stdout."""

from __future__ import annotations

import argparse
import dataclasses
import resource
import sys
import tempfile
import time
from pathlib import Path

from bench import (
    appends,
    buckets,
    cluster,
    cold,
    environment,
    live,
    load,
    peers,
    pipeline,
    reads,
    replay,
    report,
    spark,
    startup,
)
from bench.measurement import Plan, progress

MODULES = (appends, reads, replay, live, startup, buckets, cold, spark, pipeline, cluster)
BENCHMARKS = {module.BENCHMARK.name: module.BENCHMARK for module in MODULES}
RESULTS = Path(__file__).parent / "results"


def main() -> int:
    arguments = _parser().parse_args()
    if not arguments.no_write and not environment.is_clean():
        print("the tree has changes, so nobody could repeat this: commit them, or give --no-write", file=sys.stderr)
        return 1
    plan = Plan(
        rounds=arguments.rounds or (1 if arguments.quick else 3),
        seconds=arguments.seconds or (1 if arguments.quick else 2),
        is_quick=arguments.quick,
        data_parent=arguments.data_parent,
        streams=arguments.streams,
        large_mib=arguments.large_mib,
        parts=arguments.part or (),
        prepared=arguments.prepared,
    )
    _allow_many_files()
    try:
        surroundings = environment.describe(plan)
    except load.LoadGeneratorMissing as error:
        print(error, file=sys.stderr)
        return 1
    available, skipped = peers.discover()
    wanted = [peer for peer in available if not arguments.peer or peer.name in arguments.peer]
    chosen, failed = peers.rehearse(wanted, plan.data_parent)
    skipped += failed
    for one in skipped:
        progress(f"skipped: {one.name}: {one.reason}")
    if not chosen:
        print(f"no server to measure; there are: {', '.join(peer.name for peer in available)}", file=sys.stderr)
        return 1
    begin = time.monotonic()
    collected = []
    for name in arguments.benchmarks or BENCHMARKS:
        progress(f"== {name} ({time.monotonic() - begin:.0f} s so far)")
        collected.append(BENCHMARKS[name].run(chosen, plan))
        surroundings["took"] = f"{time.monotonic() - begin:.0f} s"
        environment.note_change(surroundings)
        for results in collected:
            results.environment = surroundings
        if not arguments.no_write:
            # After each one, so that what ends a later one does not take the earlier ones with it.
            merged = _merged(collected, is_partial=bool(plan.parts))
            shown = {name for results in merged for name in results.servers()}
            absent = [one for one in skipped if one.name not in shown]
            report.write(merged, absent, RESULTS, is_all=len(merged) == len(BENCHMARKS))
    if not arguments.no_write:
        progress(f"tables, data and charts are in {RESULTS}")
    print(report.as_data(collected, skipped) if arguments.json else report.glance(collected))
    return 0 if all(_is_valid(results) for results in collected) else 2


def _merged(collected: list[report.Results], *, is_partial: bool) -> list[report.Results]:
    """What was measured now, with what an earlier run has left of the other benchmarks and of their other parts."""
    found = {results.name: results for results in report.read(RESULTS)}
    for results in collected:
        earlier = found.get(results.name)
        if is_partial and earlier is not None:
            wanted = {goal.case for goal in results.goals}
            kept = {case: row for case, row in earlier.cells.items() if case in wanted}
            results = dataclasses.replace(results, cells=kept | results.cells)
        found[results.name] = results
    return [found[name] for name in BENCHMARKS if name in found]


def _parser() -> argparse.ArgumentParser:
    described = "\n".join(f"  {name:8} {benchmark.title}" for name, benchmark in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=f"Measure millstream beside its peers.\n\nbenchmarks (all, if none is named):\n{described}",
        epilog="Exit status: 0; 1 if nothing was measured; 2 if a measurement of millstream was invalid.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("benchmarks", nargs="*", choices=[[], *BENCHMARKS], metavar="benchmark")
    parser.add_argument("--quick", action="store_true", help="one round of one second, smaller data: does it work?")
    parser.add_argument("--rounds", type=int, help="rounds of each measurement (3)")
    parser.add_argument("--seconds", type=int, help="seconds of each throughput measurement (2)")
    parser.add_argument(
        "--streams", type=int, default=Plan.streams, help="streams in one bucket, for buckets and cold (%(default)s)"
    )
    parser.add_argument(
        "--large-mib", type=int, default=Plan.large_mib, help="size of the large stream of cold, MiB (%(default)s)"
    )
    parser.add_argument(
        "--part", action="append", choices=cold.PARTS, help="only this part of cold; may be repeated, the others stay"
    )
    parser.add_argument(
        "--prepared", type=Path, help="where cold and buckets find, or make and leave, what takes long to make"
    )
    parser.add_argument("--peer", action="append", help="only this server; may be repeated")
    parser.add_argument("--json", action="store_true", help="print everything measured as JSON instead of the overview")
    parser.add_argument("--no-write", action="store_true", help="leave bench/results as it is")
    parser.add_argument(
        "--data-parent",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="where the servers' directories are made; must be on a real disk (%(default)s)",
    )
    return parser


def _allow_many_files() -> None:
    """Servers and subscribers need a descriptor for each connection, some servers one for each stream."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _is_valid(results: report.Results) -> bool:
    """Whether millstream's own figures count; a peer's faults are shown, but are not ours to fail on."""
    return not any(row[report.OURS].problems for row in results.cells.values() if report.OURS in row)


if __name__ == "__main__":
    sys.exit(main())
