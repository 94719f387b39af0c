"""`python -m lightning_zenflow` is the command `lightning-zenflow`."""

import sys

from lightning_zenflow.cli import main

sys.exit(main())
