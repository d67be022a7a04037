"""A launch that overlaps the end of the kernel before it."""
