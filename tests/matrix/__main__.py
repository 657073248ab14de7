"""`python -m tests.matrix`: prints the table of the matrix, or a part of it (see `--help`)."""

import sys

from tests.matrix.table import main

if __name__ == "__main__":
    sys.exit(main())
