"""`python -m fastmp` is the `fastmp` command, for use under torchrun."""

from fastmp.apps.cli import main

raise SystemExit(main())
