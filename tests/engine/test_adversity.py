"""A peer that is another process: killed, stopped and continued in each state of a part, over each transport."""
