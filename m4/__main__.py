"""`python -m m4`: the command line."""

import sys

from m4.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
