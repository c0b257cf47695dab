"""What steps cost: ``run``, against torch's; ``compare``, two runs; ``host``, on the host; ``kernel``, the kernel."""

from __future__ import annotations

import argparse

from . import host, kernel, report, run


def main() -> None:
    """Run the command that is asked for."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run.add_arguments(commands.add_parser("run", help=run.__doc__))
    report.add_arguments(commands.add_parser("compare", help="two result files side by side"))
    host.add_arguments(commands.add_parser("host", help=host.__doc__))
    kernel.add_arguments(commands.add_parser("kernel", help=kernel.__doc__))
    args = parser.parse_args()
    args.run(args)


main()
