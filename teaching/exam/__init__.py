"""An exam: thirteen tasks, their checks, and the sheet to hand out. Not a part of the student's edition."""
