"""`warmroute check`: validates a configuration file, or prints the JSON Schema of such files."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from gateway.commands.advice import warnings_of
from gateway.commands.streams import escaped
from gateway.config.sections import sources_of
from gateway.features.table import WholeConfig, read

DESCRIPTION = (
    "Validate a configuration file. All errors are listed at once, with file and line; the exit status is then 2. Valid values"
    " that are probably a mistake (a pattern where a prefix is expected, a price for a model that no pool serves) are warnings."
    " Variables and files that are not on this machine are notes. A file of keys (`keys.url`) is checked, too, if it is here."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("file", metavar="FILE", type=Path, nargs="?", help="YAML configuration")
    what.add_argument("--schema", action="store_true", help="print the JSON Schema of configuration files, for editors")
    parser.add_argument("--strict", action="store_true", help="exit with status 1 if there are warnings")


def run(options: argparse.Namespace) -> int:
    """Run the command. Returns the exit status. Raises ConfigError."""
    if options.schema:
        from gateway.config.json_schema import editor_schema

        print(json.dumps(editor_schema(WholeConfig), indent=2))
        return 0
    from gateway.commands.surroundings import notes_of, require_libraries

    loaded = read(options.file, {})
    require_libraries(loaded.config)
    for note in notes_of(loaded):
        print(escaped(f"warmroute: note: {note}"), file=sys.stderr)
    warnings = warnings_of(loaded)
    for problem in warnings:
        print(escaped(f"warmroute: warning: {problem}"), file=sys.stderr)
    config = loaded.config
    replicas = sum(len(pool.members) for pool in config.pools)
    refused = bool(options.strict and warnings)
    result = "refused for its warnings (--strict)" if refused else "good"
    sources = f", sources: {found}" if (found := len(sources_of(config))) else ""
    what = f"pools: {len(config.pools)}, replicas: {replicas}{sources}, policy: {config.routing.policy}"
    print(escaped(f"{options.file}: {result}: {what}"))
    return int(refused)
