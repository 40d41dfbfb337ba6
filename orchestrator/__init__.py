"""One run: pure decisions in ``core``, ``policies`` and ``detection``; effects in ``shell``."""
