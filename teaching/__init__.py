"""What a teacher needs besides the lessons: editions, the class check, slides and the book."""
