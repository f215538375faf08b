"""Private names of torch: those that the course relies upon, and those that its code uses."""
