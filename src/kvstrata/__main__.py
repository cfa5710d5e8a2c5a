"""`python -m kvstrata` is `kvstrata`."""

from __future__ import annotations

import sys

from kvstrata.cli import main

sys.exit(main())
