"""Tools for teachers, besides the lessons: editions, the class check, slides and the book."""
