"""Other libraries behind fastmp's own interfaces; each is imported when it is asked for, and no sooner."""
