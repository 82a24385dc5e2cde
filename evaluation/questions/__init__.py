"""What is asked: samples of tasks, in two forms, and how answers are judged."""
