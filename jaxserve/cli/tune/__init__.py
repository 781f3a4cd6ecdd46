"""`jaxserve tune`: step profiles, bucket plans, token budgets and capacity."""
