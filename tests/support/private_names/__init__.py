"""Private names of torch: those listed as needed, and those that the code uses."""
