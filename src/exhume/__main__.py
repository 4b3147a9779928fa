"""`python -m exhume` is the command line."""

from exhume.cli import main

main()
