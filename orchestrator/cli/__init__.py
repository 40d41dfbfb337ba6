"""The commands of ``everstep``. Their exit codes are in ``exit_codes.TABLE``."""
