"""The draft model and what it is made of."""
