"""``python -m inferflow.cli``."""

from inferflow.cli.main import main

main()
