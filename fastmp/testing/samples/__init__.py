"""Sample arguments of the ops, grouped by subject: each module lists its op families in `FAMILIES`."""
