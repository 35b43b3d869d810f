"""`python -m jax_titan ...` is `jax-titan ...`."""

import sys

from jax_titan.cli import main

if __name__ == "__main__":
    sys.exit(main())
