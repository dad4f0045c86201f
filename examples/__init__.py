"""Programs to read and to run; each one is also a test."""
