"""`python -m m4` and `m4`: the command line. Signals end it before anything slow is imported."""

import os
import sys
from collections.abc import Sequence

from m4.parallel.platform import signals


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `m4.cli.main.main`; as the program itself, with handlers for signals."""
    try:
        if arguments is None:
            signals.install()
            # A notebook's shell names the notebook's backend, which may not be installed here.
            os.environ.pop("MPLBACKEND", None)
        from m4.cli.main import main

        return main(arguments)
    except BaseException as error:
        if (status := signals.status_of(error)) is None:
            raise
        print(f"m4: {signals.message(error)}", file=sys.stderr)
        return status


if __name__ == "__main__":
    sys.exit(main())
