"""The command line ``rollproof``; one module per command."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line and exit.

    Exit codes: 0 all pass, 1 some fail, 2 unknown only, 254 bad arguments, 255 internal error, 130
    interrupted.
    """
    # Imported here, because the commands import numpy, pyarrow and typer: streams must be safe, and
    # Ctrl-C one line, before that.
    from rollproof.cli.safe_stdio import open_streams
    from rollproof.core.extras import require_extra
    from rollproof.errors import ExtraError

    open_streams()
    try:
        require_extra("cli", "The commands of rollproof")
        from rollproof.cli.app import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # during the imports; `run` handles it later
        sys.stderr.write("rollproof: interrupted\n")
        code = 130
    except ExtraError as error:  # of a command, `run` reports it
        sys.stderr.write(f"rollproof: error: {error}\n")
        code = 254
    sys.exit(code)
