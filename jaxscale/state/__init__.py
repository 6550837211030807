"""What a step carries on: the train state, where its leaves lie, how batches are split, and the form saved."""
