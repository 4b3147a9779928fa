"""The equations that tie samples to weights; they know nothing of solvers."""
