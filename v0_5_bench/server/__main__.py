"""`python -m` with this package's name serves.

Only here does the server meet the harness, which hands it the routes of `--profile`.
"""

import sys

from ..harness.explain import profile_routes
from .app import main

if __name__ == "__main__":
    sys.exit(main(install_profile=profile_routes.install))
