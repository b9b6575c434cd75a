"""`python -m` with the package's name runs this milestone's lesson."""

import sys

from .cluster.main import main

if __name__ == "__main__":
    sys.exit(main())
