"""Victims: data sets from installed packages, networks and trainers for demos, tests and experiments."""
