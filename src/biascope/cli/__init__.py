"""The `biascope` command. Each subcommand is one thin file; the work is done by the library.

Exit codes: 0 done, 1 an error (one line says which), 130 interrupted. `BIASCOPE_DEBUG=1` shows tracebacks.
"""

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the `biascope` command."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        print(f"the biascope command needs {error.name}: pip install 'biascope[cli,plot]'", file=sys.stderr)
        sys.exit(1)
    from biascope.cli.app import run

    sys.exit(run(sys.argv[1:] if arguments is None else arguments))
