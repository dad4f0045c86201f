"""`python -m scalesteer` is the command line."""

from scalesteer.app.cli import main

raise SystemExit(main())
