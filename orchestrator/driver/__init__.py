"""The process that a user starts: launch, follow, doctor, convert, demo."""
