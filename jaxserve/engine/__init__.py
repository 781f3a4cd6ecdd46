"""Token ids in, token ids out: the loop of schedule, pack, dispatch, fetch, update."""
