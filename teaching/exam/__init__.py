"""An exam: thirteen tasks, their checks, and the sheet to hand out; not in the student edition."""
