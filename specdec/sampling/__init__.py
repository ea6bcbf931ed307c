"""From a row of logits and a history to the law's token and its log-probabilities."""
