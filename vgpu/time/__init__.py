"""Virtual time: what operations cost, when they run, and how both are recorded."""
