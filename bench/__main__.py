"""``python -m bench host``: what a step costs the host; ``python -m bench kernel``: what its kernel moves."""

from __future__ import annotations

import argparse

from . import host, kernel


def main() -> None:
    """Run the command that is asked for."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    host.add_arguments(commands.add_parser("host", help=host.__doc__))
    kernel.add_arguments(commands.add_parser("kernel", help=kernel.__doc__))
    args = parser.parse_args()
    args.run(args)


main()
