"""`python cli.py ...` in a checkout is the command `boleinfer ...`. Holds nothing else."""

import sys

from boleinfer.cli import main

if __name__ == "__main__":
    sys.exit(main())
