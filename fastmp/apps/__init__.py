"""The `fastmp` command: one module a subcommand, and the applications behind them."""
