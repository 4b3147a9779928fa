"""Moves on sets of candidates: searching, merging and pruning; they see objectives, never data."""
