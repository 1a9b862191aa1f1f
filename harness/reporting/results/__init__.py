"""Results of runs that are stored for later: one file for each release and run, and what changed
from one release to the next.
"""
