"""Sample arguments of the ops: a module for each family, whose `samples` yields argument tuples of one op."""
