"""The command line: arguments, one line for every mistake, exit statuses."""
