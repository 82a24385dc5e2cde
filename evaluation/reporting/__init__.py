"""What was answered: intervals, tables, pictures and one page."""
