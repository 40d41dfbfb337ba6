"""What only a GPU can show, with one command and on one GPU that several ranks share.

    python -m tests.gpu                     # every part, about sixteen minutes
    python -m tests.gpu --quick             # with the smallest settings, about eight
    python -m tests.gpu kills groups        # some of them
    python -m tests.gpu --on-cpu --quick    # stand-ins on a CPU: do the parts themselves work?

It needs no installation: the project's folder and a torch that sees a GPU are enough. Each part
prints rows (``rows``): what was seen, beside what it is to be. A part that cannot run says why.
"""
