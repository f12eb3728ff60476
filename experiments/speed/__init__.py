"""Times, memory, accelerators."""
