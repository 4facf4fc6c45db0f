"""The configuration reference, made from the settings: `python -m millstream.cli.configuration_docs`."""

from __future__ import annotations

from millstream import config as configuration

HEADER = """# Configuration

Generated from the settings; do not edit. Precedence: defaults < TOML file < environment < flags. A setting
`section.key` is written as `key` under `[section]` in the file (which starts with `version = 1`), as
`MILLSTREAM_SECTION_KEY` in the environment, and as `--set section.key=value` on the command line. A value that starts
with `$` names an environment variable.
"""


def render() -> str:
    lines = [HEADER]
    section = ""
    for key, default, kind, doc in configuration.describe():
        name = key.partition(".")[0]
        if name != section:
            section = name
            lines += [f"\n## [{name}]\n", "| key | default | what it is | |", "|---|---|---|---|"]
        lines.append(f"| `{key}` | {f'`{default}`' if default else ''} | {kind.expects} | {doc} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(render(), end="")
