"""``python -m isthmus`` is the same as the ``isthmus`` command."""

import sys

from isthmus.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
