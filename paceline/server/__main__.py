"""`python -m paceline.server`: the same as `paceline serve`."""

import sys

from paceline.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "serve")
    main()
