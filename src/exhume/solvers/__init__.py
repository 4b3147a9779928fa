"""Solvers: they minimise what is bound to them and know nothing of equations, attacks or data."""
