"""The configuration reference, made from the settings: `make generate`."""

from __future__ import annotations

from pathlib import Path

from millstream import config as configuration

HEADER = """# Configuration

Generated from the settings; do not edit. Precedence: defaults < TOML file < environment < flags. A setting
`section.key` is written as `key` under `[section]` in the file (which starts with `version = 1`), as
`MILLSTREAM_SECTION_KEY` in the environment, and as `--set section.key=value` on the command line. A value that starts
with `$` names an environment variable.

What names no setting is refused, with the name that was probably meant. A variable of the environment that only looks
like a setting is ignored with a warning instead, because others set those too: Kubernetes, for one, makes
`MILLSTREAM_SERVER_PORT` for a Service called `millstream-server`.
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
    (Path(__file__).parents[1] / "docs" / "configuration.md").write_text(render())
