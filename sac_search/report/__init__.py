"""What people see of a search: rows first, then a terminal."""
