"""The package behind the course: virtual GPUs, a launcher for processes, and what lessons need."""
