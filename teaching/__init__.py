"""What a teacher needs beside the lessons: editions, a class's answers, slides and the book."""
