"""`python -m bench.gateway`: costs of the data plane, compared with its peers."""

import sys

from bench.gateway.data_plane import main

if __name__ == "__main__":
    sys.exit(main())
