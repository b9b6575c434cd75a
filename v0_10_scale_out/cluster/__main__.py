"""`python -m` with this package's name serves."""

import sys

from .main import main

if __name__ == "__main__":
    sys.exit(main())
