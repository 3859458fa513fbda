"""Short adapters to other libraries. Nothing else imports them, and each imports its library."""
