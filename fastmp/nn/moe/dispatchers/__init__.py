"""Token dispatchers: each brings tokens to the ranks that hold their experts, and the outputs back.

`dispatcher` has the interface; a module each implements `local` (one rank), `sharing` (expert tensor
parallelism only), `alltoall`, `allgather`, `symmetric` and `deepep`. Their facts are in
`fastmp.config.dispatchers`.
"""
