"""`python -m bench.gateway`: what the data plane costs, beside its peers."""

import sys

from bench.gateway.data_plane import main

if __name__ == "__main__":
    sys.exit(main())
