"""Pools of state, and what a serving worker does with the draft model."""
