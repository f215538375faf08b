"""An exam: thirteen tasks, their checks, and the sheet to hand out. Not part of the student edition."""
