"""Load samples outside the user's loop: in child processes, or in this one with copies of the dataset."""
