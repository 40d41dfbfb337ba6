"""Trainers of other libraries on everstep's loop; each module needs its library."""
