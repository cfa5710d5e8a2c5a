"""Is it true? Tasks, measurements and reports."""
