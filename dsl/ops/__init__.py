"""The tables of the language: functions and names, what each takes and means."""
