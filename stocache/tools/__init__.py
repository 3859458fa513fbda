"""What looks at a training from outside: the command, `stocache run`, `bench`, `advise` and `plot`. Nothing imports it."""
