"""`python -m tests.matrix`: the table of the matrix, or a part of it; `--help` says which."""

import sys

from tests.matrix.table import main

if __name__ == "__main__":
    sys.exit(main())
