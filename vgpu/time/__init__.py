"""Virtual time: what operations cost, when they run, and what a recording keeps of it."""
