"""The controller's decisions: ``machine.step`` folds events into a state, returns actions."""
