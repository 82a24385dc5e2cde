"""Reports on the answers of a run: intervals, tables, pictures and one page."""
