"""`python -m scalesteer` is the command line."""

from scalesteer.cli import main

raise SystemExit(main())
