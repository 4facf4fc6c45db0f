"""`millstream completion bash|zsh|fish`: a completion script, made from the commands themselves."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from millstream.cli.tree import Command, Option, commands


def add_parser(found: Any) -> None:
    parser: argparse.ArgumentParser = found.add_parser(
        "completion",
        help="print a completion script for a shell",
        description="Print a completion script for a shell, to be loaded in its start-up file: with eval in bash and"
        " zsh, piped to source in fish.",
        epilog='example: eval "$(millstream completion bash)"',
    )
    parser.add_argument("shell", choices=tuple(SHELLS), help="the shell")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from millstream.cli.main import build_parser  # which knows this module

    print("\n".join(SHELLS[options.shell](list(commands(build_parser())))))
    return 0


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


def _cases(found: Sequence[Command], answer: Callable[[str], str], files: str) -> Iterator[str]:
    """The two questions both shells ask: what may follow an option, and what else may stand here."""
    yield '    case "$chain:$previous" in'
    for command, option in _valued(found):
        patterns = "|".join(f'"{" ".join(command.path)}:{flag}"' for flag in option.flags)
        if option.choices:
            yield f"        {patterns}) {answer(' '.join(option.choices))}; return ;;"
        else:
            yield f"        {patterns}) {files if option.is_file else ':'}; return ;;"
    yield "    esac"
    yield '    case "$chain" in'
    for command in found:
        yield f'        "{" ".join(command.path)}") {answer(" ".join(_words(command)))} ;;'
    yield "    esac"


def _walk(found: Sequence[Command]) -> str:
    """Which words lead further down the tree."""
    return "|".join(f'"{" ".join(command.path)}"' for command in found if command.path)


def _bash(found: Sequence[Command]) -> Iterator[str]:
    yield "_millstream() {"
    yield '    local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}" chain="" word'
    yield '    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do'
    yield '        case "${chain:+$chain }$word" in'
    yield f'            {_walk(found)}) chain="${{chain:+$chain }}$word" ;;'
    yield "        esac"
    yield "    done"
    yield "    COMPREPLY=()"
    files = 'COMPREPLY=($(compgen -f -- "$current"))'
    yield from _cases(found, lambda words: f'COMPREPLY=($(compgen -W "{words}" -- "$current"))', files)
    yield "}"
    yield "complete -o default -F _millstream millstream"


def _zsh(found: Sequence[Command]) -> Iterator[str]:
    yield "#compdef millstream"
    yield "_millstream() {"
    yield '    local previous="${words[CURRENT-1]}" chain="" word'
    yield '    for word in "${(@)words[2,CURRENT-1]}"; do'
    yield '        case "${chain:+$chain }$word" in'
    yield f'            {_walk(found)}) chain="${{chain:+$chain }}$word" ;;'
    yield "        esac"
    yield "    done"
    yield from _cases(found, lambda words: f"compadd -- {words}", "_files")
    yield "}"
    yield "compdef _millstream millstream"


# -- fish --------------------------------------------------------------------------------------------------------


def _fish(found: Sequence[Command]) -> Iterator[str]:
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
    line = f"complete -c millstream -n {condition}"
    if not option.flags:
        if option.choices:
            yield f"{line} -a {_quoted(' '.join(option.choices))} -d {_quoted(option.help)}"
        elif option.metavar is not None and ("FILE" in option.metavar):
            yield f"{line} -F"
        return
    for flag in option.flags:
        line += f" -l {flag[2:]}" if flag.startswith("--") else f" -s {flag[1:]}"
    if option.metavar is not None:
        line += " -r -F" if option.is_file else " -x"
        if option.choices:
            line += f" -a {_quoted(' '.join(option.choices))}"
    yield f"{line} -d {_quoted(option.help)}"


SHELLS: Final[dict[str, Callable[[Sequence[Command]], Iterator[str]]]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
