"""`millstream completion bash|zsh|fish`: a completion script, generated from the commands.

Buckets and streams are completed by asking the server, through the same command (`--buckets`, `--streams`). If the
server does not answer at once, there are no suggestions and no error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Final

from millstream.cli.parser import Parser
from millstream.cli.remote import add_connection, connect
from millstream.cli.tree import Command, Option, commands
from millstream.client import Client
from millstream.errors import MillstreamError
from millstream.protocol.keys import DEFAULT_BUCKET

ANSWER_SECONDS: Final = 2.0
NAMES_MAX: Final = 200
# The names of arguments that take a bucket or a stream.
_KINDS: Final = {"BUCKET": "buckets", "STREAM": "streams", "SOURCE": "streams", "TARGET": "streams"}


def add_parser(found: Any) -> None:
    parser: Parser = found.add_parser(
        "completion",
        help="print a completion script for a shell",
        description="Print a completion script for a shell, to be loaded in its start-up file: with eval in bash and"
        " zsh, piped to source in fish. It completes commands, options, files, and the buckets and streams of the"
        " server that --url or $MILLSTREAM_URL names.",
        epilog='example: eval "$(millstream completion bash)"',
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("shell", choices=tuple(SHELLS), nargs="?", help="the shell")
    what.add_argument("--buckets", metavar="START", help="print the server's buckets that start so, for the scripts")
    what.add_argument("--streams", metavar="START", help="print the server's streams that start so, for the scripts")
    add_connection(parser, seconds=ANSWER_SECONDS)
    parser.set_defaults(run=lambda options: run(options, parser))


def run(options: argparse.Namespace, parser: Parser) -> int:
    from millstream.cli.main import build_parser  # imported here because it imports this module

    if options.shell is not None:
        print("\n".join(SHELLS[options.shell](list(commands(build_parser())))))
    elif options.buckets is not None or options.streams is not None:
        for name in _names(options):
            sys.stdout.write(f"{name}\n")
    else:
        parser.error(f"name a shell: {', '.join(SHELLS)}")
    return 0


# -- names from the server ---------------------------------------------------------------------------------------


def _names(options: argparse.Namespace) -> list[str]:
    try:
        with connect(options, retries=0) as client:
            if options.buckets is not None:
                return [name for name in client.buckets() if name.startswith(options.buckets)]
            return list(_streams(client, options.streams))
    except MillstreamError:
        return []  # the user is typing, so errors are not shown


def _streams(client: Client, start: str) -> Iterator[str]:
    """Streams as a user types them. Before the first slash: the buckets, and the streams of the default bucket."""
    bucket, slash, prefix = start.partition("/")
    if slash:
        for entry in islice(client.bucket(bucket).list(prefix), NAMES_MAX):
            yield f"{bucket}/{entry.name}"
        return
    names = client.buckets()
    yield from (f"{name}/" for name in names if name.startswith(start) and name != DEFAULT_BUCKET)
    if DEFAULT_BUCKET in names:
        yield from (entry.name for entry in islice(client.bucket(DEFAULT_BUCKET).list(start), NAMES_MAX))


def _kind(option: Option) -> str | None:
    """Whether an option or argument names buckets or streams."""
    return _KINDS.get((option.metavar or "").strip("[]…"))


def _kind_of_arguments(command: Command) -> str | None:
    return next((kind for option in command.options if not option.flags and (kind := _kind(option))), None)


# -- words from the commands -------------------------------------------------------------------------------------


def _words(command: Command) -> list[str]:
    flags = [flag for option in command.options for flag in option.flags if flag.startswith("--")]
    choices = [choice for option in command.options if not option.flags for choice in option.choices]
    return [*command.subcommands, *choices, *flags]


def _valued(found: Sequence[Command]) -> Iterator[tuple[Command, Option]]:
    for command in found:
        for option in command.options:
            if option.flags and option.metavar is not None:
                yield command, option


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


# -- bash and zsh ------------------------------------------------------------------------------------------------


def _cases(
    found: Sequence[Command], answer: Callable[[str], str], names: Callable[[str], str], files: str
) -> Iterator[str]:
    """The two decisions both shells make: what may follow an option, and what else is valid at this place."""
    yield '    case "$chain:$previous" in'
    for command, option in _valued(found):
        patterns = "|".join(f'"{" ".join(command.path)}:{flag}"' for flag in option.flags)
        kind = _kind(option)
        if option.choices:
            yield f"        {patterns}) {answer(' '.join(option.choices))}; return ;;"
        elif kind is not None:
            yield f"        {patterns}) {names(kind)}; return ;;"
        else:
            yield f"        {patterns}) {files if option.is_file else ':'}; return ;;"
    yield "    esac"
    yield '    case "$chain" in'
    for command in found:
        kind = _kind_of_arguments(command)
        more = f"; {names(kind)}" if kind is not None else ""
        yield f'        "{" ".join(command.path)}") {answer(" ".join(_words(command)))}{more} ;;'
    yield "    esac"


def _walk(found: Sequence[Command]) -> Iterator[str]:
    """How both shells determine the command that is being typed, and its server."""
    yield '        case "${chain:+$chain }$word" in'
    patterns = "|".join(f'"{" ".join(command.path)}"' for command in found if command.path)
    yield f'            {patterns}) chain="${{chain:+$chain }}$word" ;;'
    yield "        esac"
    yield '        [[ $last == --url ]] && url="$word"'
    yield '        last="$word"'


def _bash(found: Sequence[Command]) -> Iterator[str]:
    yield "_millstream_names() {"
    yield "    [[ $current == -* ]] && return"
    yield '    "${COMP_WORDS[0]}" completion "--$1" "$current" ${url:+"--url=$url"} 2>/dev/null'
    yield "}"
    yield "_millstream() {"
    yield '    local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}" chain="" word last url'
    yield '    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do'
    yield from _walk(found)
    yield "    done"
    yield "    COMPREPLY=()"
    files = 'COMPREPLY=($(compgen -f -- "$current"))'
    yield from _cases(
        found,
        lambda words: f'COMPREPLY=($(compgen -W "{words}" -- "$current"))',
        lambda kind: f'COMPREPLY+=($(compgen -W "$(_millstream_names {kind})" -- "$current"))',
        files,
    )
    yield "    [[ ${#COMPREPLY[@]} == 1 && $COMPREPLY == */ ]] && compopt -o nospace 2>/dev/null"
    yield "    return 0"
    yield "}"
    yield "complete -o default -F _millstream millstream"


def _zsh(found: Sequence[Command]) -> Iterator[str]:
    yield "#compdef millstream"
    yield "_millstream_names() {"
    yield "    [[ ${words[CURRENT]} == -* ]] && return"
    yield '    "${words[1]}" completion "--$1" "${words[CURRENT]}" ${url:+"--url=$url"} 2>/dev/null'
    yield "}"
    yield "_millstream() {"
    yield '    local previous="${words[CURRENT-1]}" chain="" word last url'
    yield '    for word in "${(@)words[2,CURRENT-1]}"; do'
    yield from _walk(found)
    yield "    done"
    yield from _cases(
        found,
        lambda words: f"compadd -- {words}",
        lambda kind: f"compadd -S '' -- ${{(f)\"$(_millstream_names {kind})\"}}",
        "_files",
    )
    yield "}"
    yield "compdef _millstream millstream"


# -- fish --------------------------------------------------------------------------------------------------------


def _fish(found: Sequence[Command]) -> Iterator[str]:
    yield "function __millstream_names"
    yield "    set -l words (commandline -opc)"
    yield "    set -l url"
    yield "    if set -l at (contains -i -- --url $words)"
    yield "        set url --url $words[(math $at + 1)]"
    yield "    end"
    yield "    $words[1] completion --$argv[1] (commandline -ct) $url 2>/dev/null"
    yield "end"
    yield "complete -c millstream -f"
    for command in found:
        condition = _fish_condition(command)
        for name in command.subcommands:
            child = next(one for one in found if one.path == (*command.path, name))
            yield f"complete -c millstream -n {condition} -a {name} -d {_quoted(child.help)}"
        for option in command.options:
            yield from _fish_option(condition, option)


def _fish_condition(command: Command) -> str:
    seen = [f"__fish_seen_subcommand_from {name}" for name in command.path]
    if command.subcommands:
        seen.append(f"not __fish_seen_subcommand_from {' '.join(command.subcommands)}")
    return _quoted("; and ".join(seen) or "true")


def _fish_option(condition: str, option: Option) -> Iterator[str]:
    line, kind = f"complete -c millstream -n {condition}", _kind(option)
    if not option.flags:
        if option.choices:
            yield f"{line} -a {_quoted(' '.join(option.choices))} -d {_quoted(option.help)}"
        elif kind is not None:
            yield f"{line} -a '(__millstream_names {kind})'"
        elif option.metavar is not None and ("FILE" in option.metavar):
            yield f"{line} -F"
        return
    for flag in option.flags:
        line += f" -l {flag[2:]}" if flag.startswith("--") else f" -s {flag[1:]}"
    if option.metavar is not None:
        line += " -r -F" if option.is_file else " -x"
        if option.choices:
            line += f" -a {_quoted(' '.join(option.choices))}"
        elif kind is not None:
            line += f" -a '(__millstream_names {kind})'"
    yield f"{line} -d {_quoted(option.help)}"


SHELLS: Final[dict[str, Callable[[Sequence[Command]], Iterator[str]]]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
