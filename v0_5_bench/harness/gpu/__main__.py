"""`python -m` with this package's name runs everything that needs a GPU."""

import sys

from .checks import main

if __name__ == "__main__":
    sys.exit(main())
