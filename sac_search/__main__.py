"""`python -m sac_search` is `sac-search`."""

import sys

from sac_search.cli import main

sys.exit(main())
