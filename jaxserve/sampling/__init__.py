"""From logits to tokens and log-probabilities: the host half (rows of parameters) beside the device half."""
