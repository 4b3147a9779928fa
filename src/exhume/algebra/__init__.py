"""Closed-form recovery of samples from two-layer networks with a polynomial activation."""
