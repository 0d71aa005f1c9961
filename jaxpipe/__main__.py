"""``python -m jaxpipe``: the command, where its script is not on the path."""

import sys

from jaxpipe.cli import main


sys.exit(main())
