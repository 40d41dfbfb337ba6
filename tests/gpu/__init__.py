"""Tests that need a GPU, with one command and on one GPU that several ranks share.

    python -m tests.gpu                 # the parts with the smallest settings that fit five minutes
    python -m tests.gpu kills groups    # some parts, as long as they take
    python -m tests.gpu --full          # every part with its whole settings, about 20 minutes
    python -m tests.gpu --on-cpu        # stand-ins on a CPU: do the parts themselves work?

It needs no installation: the project's folder and a torch that sees a GPU are enough. Each part
prints rows (``rows``): what was seen, beside what it is to be. A part that is skipped
says why.
"""
