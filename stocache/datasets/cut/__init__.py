"""Cut the program of a dataset where it first draws random numbers: what comes before is cached, the rest runs each time."""
